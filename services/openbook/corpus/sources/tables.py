"""CSV and TSV with a line of names above, and DPR's `psgs_w100.tsv`, whose rows are passages."""

import csv
from collections.abc import Iterator

from openbook.core.documents import Document
from openbook.corpus.sources import records
from openbook.corpus.sources.encodings import decoded
from openbook.corpus.sources.limits import Failed, Failure, one_line
from openbook.corpus.sources.opened import Opened
from openbook.corpus.sources.recognise import columns_of, delimiter_of

DPR = ["id", "text", "title"]
_IN_A_VALUE = "new-line character seen in unquoted field"
"""What `csv` says of a carriage return that ends no line."""


def read(opened: Opened) -> Iterator[Document | Failure]:
    """A document a row; a row that is none is a failure, and the next is read.

    Raises:
        Failed: no column is called as a text is, or as the user says, or from some line on no rows can be told apart.
    """
    bad: list[Failed] = []  # lines of the row at hand
    lines = _decoded(opened, bad)
    first = next(lines, "")
    is_dpr = _is_dpr(first)
    delimiter = "\t" if is_dpr else delimiter_of(first, opened.names)
    if delimiter is None and columns_of(first, ",") in ([name] for name in opened.names.text):  # the only column
        delimiter = ","
    if delimiter is None:
        raise bad[0] if bad else Failed(f"the first line must name columns, one of them {opened.names.texts()}")
    names = DPR if is_dpr else columns_of(first, delimiter)
    records.check_columns(opened, names)
    has_header = columns_of(first, delimiter) == names
    csv.field_size_limit(opened.limits.document_bytes)
    shown = one_line(", ".join(names))
    has_ended = False

    def to_the_end() -> Iterator[str]:
        nonlocal has_ended
        yield first
        yield from lines
        has_ended = True
        yield "\n"  # a row of its own, unless a quote is open

    rows = csv.reader(to_the_end(), delimiter=delimiter)
    while True:
        begun = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            if _IN_A_VALUE in str(error) and not (begun == 1 and has_header):  # then no quote is open
                bad.clear()
                yield Failure(f"{opened.path}:{begun}", "a line end within a value that is not quoted")
                continue
            why = f"line {begun}: not separated values: {error}: what lies behind it is left out"
            raise Failed(why) from None  # there may be a quote open
        if row is None:
            return
        if row and has_ended:
            raise Failed(f"line {begun}: a quote that never ends: what lies behind it is left out")
        if (begun == 1 and has_header) or (not row and not bad):
            continue
        try:
            if bad:
                raise bad.pop()
            if len(row) != len(names):
                raise Failed(f"must have {len(names)} columns ({shown}), got {len(row)}")
            yield records.document(opened, dict(zip(names, row, strict=True)), begun, is_passage=is_dpr)
        except Failed as error:
            bad.clear()
            yield Failure(f"{opened.path}:{begun}", str(error))


def _is_dpr(first: str) -> bool:
    """Three columns, named as DPR's are, or without names but numbered as they are."""
    names = columns_of(first, "\t")
    return len(names) == 3 and (names == DPR or names[0].isdecimal())


def _decoded(opened: Opened, bad: list[Failed]) -> Iterator[str]:
    """The lines; one that cannot be read is told in `bad`, and is none of its row's."""
    for _, line in opened.lines():
        try:
            if isinstance(line, Failed):
                raise line
            yield decoded(line)
        except Failed as error:
            bad.append(error)
            yield "\n"
