"""Files of any kind to documents: recognised by content, parsed by processes with limits, failures told one by one.

walk       the files of a folder, in order
parsers    processes that parse, and what becomes of one that dies
worker     such a process
parse      a file to documents, whatever it is; archives and compression are taken apart here
recognise  what a file is, by how it begins
the rest   a family of formats each: records, tables, columns, plain, web, pdf, office, wiki
"""
