"""DOCX and EPUB: archives of XML, a document each. Macros, links and whatever else is in them is not looked at."""

import posixpath
import re
import zipfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from openbook.core.documents import Document
from openbook.corpus.sources import stated, web
from openbook.corpus.sources.limits import Failed, counted
from openbook.corpus.sources.opened import Opened

WORD = "word/document.xml"
NOTES = ("word/footnotes.xml", "word/endnotes.xml")
PROPERTIES = "docProps/core.xml"
STYLES = "word/styles.xml"
CONTAINER = "META-INF/container.xml"
_OTHERS = (
    ({"[Content_Types].xml", "xl/workbook.xml"}, "a workbook of Excel: save its tables as CSV"),
    ({"[Content_Types].xml", "ppt/presentation.xml"}, "slides of PowerPoint: save them as PDF"),
    ({"mimetype", "content.xml"}, "a document of LibreOffice: save it as DOCX, PDF or CSV"),
)
_HEADING = re.compile(r"heading ?([1-9])", re.IGNORECASE)


def is_docx(names: set[str]) -> bool:
    """Whether an archive with these members is one."""
    return {"[Content_Types].xml", WORD} <= names


def is_epub(names: set[str]) -> bool:
    """Whether an archive with these members is one."""
    return {"mimetype", CONTAINER} <= names


def check_no_other(names: set[str]) -> None:
    """Refuse archives that are documents of another kind, whose members say little by themselves. Raises Failed."""
    for members, kind in _OTHERS:
        if members <= names:
            raise Failed(kind)


def read_docx(opened: Opened, archive: zipfile.ZipFile) -> Iterator[Document]:
    """Paragraphs, and tables a row a line; then the notes. What was deleted under "track changes" is left out."""
    names = archive.namelist()
    levels = _levels(_xml(opened, archive, STYLES)) if STYLES in names else {}
    words: list[str] = []
    found: list[tuple[int, int]] = []  # headings: where they begin, and their levels
    size = n_body = 0
    for name in (WORD, *(each for each in NOTES if each in names)):
        for element, word in _words(_xml(opened, archive, name)):
            words.append(word)
            size += len(word)
            if word == "\n" and (level := _level(element, levels)):
                found.append((size, level))
        n_body = n_body or size
    text = "".join(words)
    properties = _xml(opened, archive, PROPERTIES) if PROPERTIES in names else None
    title = _title(properties) if properties is not None else ""
    outline = stated.Outline(title)
    for position, level in found:
        if heading := text[position:].split("\n", 1)[0].strip():
            outline.add(position, level, heading)
    if n_body < size:
        outline.add(n_body, 1, "")  # notes are of no section
    known = _known(properties) if properties is not None else {}
    yield opened.document(opened.path, title or opened.stem, text, sections=outline.sections, **known)


def _words(body: Any) -> Iterator[tuple[Any, str]]:
    """The elements that text is made of, each with its own."""
    from lxml import etree

    # What stands there again: for old readers beside it, and what was moved at the place that it had.
    for again in list(body.iter("{*}Fallback", "{*}moveFrom")):
        again.getparent().remove(again)
    ends = {"p": "\n", "tc": "| ", "tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
    for element in body.iter("{*}t", *(f"{{*}}{name}" for name in ends)):
        yield element, element.text or "" if (name := etree.QName(element).localname) == "t" else ends[name]


def _levels(styles: Any) -> dict[str, int]:
    """Of the styles that are headings; their ids depend on the language of who wrote it, their names do not."""
    named = ((style, _value(style.find("{*}name"))) for style in styles.iter("{*}style"))
    return {_value(style, "styleId"): int(found[1]) for style, name in named if (found := _HEADING.fullmatch(name))}


def _level(paragraph: Any, levels: dict[str, int]) -> int:
    """Of a heading, from 1; of anything else 0."""
    style = _value(paragraph.find("{*}pPr/{*}pStyle"))
    if not style:
        return 0
    found = _HEADING.fullmatch(style)
    return levels.get(style) or (int(found[1]) if found else 0)


def _value(element: Any, attribute: str = "val") -> str:
    """An attribute, in whatever namespace."""
    attributes = element.attrib.items() if element is not None else ()
    return next((value for name, value in attributes if name.rpartition("}")[2] == attribute), "")


def read_epub(opened: Opened, archive: zipfile.ZipFile) -> Iterator[Document]:
    """The chapters in the order in which they are read.

    Raises:
        Failed: it does not say which they are.
    """
    container = _xml(opened, archive, CONTAINER)
    package_path = next((each.get("full-path") for each in container.iter("{*}rootfile")), None)
    if not package_path:
        raise Failed(f"{CONTAINER} names no package")
    package = _xml(opened, archive, package_path)
    places = {each.get("id"): each.get("href", "") for each in package.iter("{*}item")}
    folder = posixpath.dirname(package_path)
    chapters: list[str] = []
    headings: list[tuple[int, str]] = []
    for each in package.iter("{*}itemref"):
        if not (place := places.get(each.get("idref"))):
            raise Failed(f"its spine names {each.get('idref')!r}, which is not there")
        name = posixpath.normpath(posixpath.join(folder, unquote(place)))
        chapter = _xml(opened, archive, name)
        chapters.append(web.text_of(chapter))
        headings += web.headings(chapter)
    if not any(chapters):
        raise Failed("no text found")
    text, title = "\n".join(chapters), _title(package) or opened.stem
    sections = stated.sections_of(text, headings, title)
    yield opened.document(opened.path, title, text, sections=sections, **_known(package))


def _title(tree: Any) -> str:
    return _first(tree, "{http://purl.org/dc/elements/1.1/}title")


def _known(tree: Any) -> dict[str, Any]:
    """What Dublin Core's elements say."""
    core, terms = "{http://purl.org/dc/elements/1.1/}", "{http://purl.org/dc/terms/}"
    date = _first(tree, f"{core}date") or _first(tree, f"{terms}created")
    return stated.known(
        {"language": _first(tree, f"{core}language"), "date": date, "url": _first(tree, f"{core}source")}
    )


def _first(tree: Any, name: str) -> str:
    from lxml import etree

    return next((" ".join("".join(each.itertext(etree.Element)).split()) for each in tree.iter(name)), "")


def _xml(opened: Opened, archive: zipfile.ZipFile, name: str) -> Any:
    """The root of a member. No entity is resolved, nothing else is opened."""
    from lxml import etree

    most = 4 * opened.limits.document_bytes
    try:
        with counted(archive.open(name), opened.budget) as file:
            content = file.read(most + 1)
    except KeyError:
        raise Failed(f"holds no {name}") from None
    if len(content) > most:
        raise Failed(f"{name} has more than {most} bytes")
    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
    return etree.fromstring(content, parser)
