"""JSON lines: our own, WikiExtractor's, BEIR's, KILT's and Natural Questions', told apart record by record."""

from collections.abc import Iterator
from typing import Any

from openbook.core.documents import Document
from openbook.core.json_text import LongNumber, read_json
from openbook.corpus.sources import stated, web
from openbook.corpus.sources.encodings import decoded
from openbook.corpus.sources.limits import Failed, Failure, one_line
from openbook.corpus.sources.opened import Opened

KILT_SECTION = "Section::::"
KILT_MARKS = (KILT_SECTION, "BULLET::::- ", "BULLET::::")

HTML_FIELDS = ("document_html", "document_text")
"""What Natural Questions calls a page, whole or as its tokens, tags among them."""

NAMES = {"document_title": "title", "document_url": "url", "example_id": "id"}


def read(opened: Opened) -> Iterator[Document | Failure | None]:
    """A document a line, None an empty one. A line that is none is a failure, and the next is read."""
    for number, line in opened.lines():
        if number <= opened.n_passed:
            yield None
            continue
        try:
            if isinstance(line, Failed):
                raise line
            yield document(opened, _parsed(line), number) if line.strip() else None
        except Failed as error:
            yield Failure(f"{opened.path}:{number}", str(error))


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = read_json(decoded(line))
    except LongNumber as error:
        raise Failed(str(error)) from None
    except (ValueError, RecursionError) as error:  # also of brackets too deep
        raise Failed(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise Failed("must be an object with id, title and text")
    return record


def document(opened: Opened, record: dict[str, Any], number: int, is_passage: bool = False) -> Document:
    """A row or an object as a document; without an id it is called by its place. Raises Failed."""
    names = opened.names
    text_field = _field(record, names.text)
    html_field = None if text_field else _field(record, HTML_FIELDS)
    if not (text_field or html_field):
        raise Failed(f"has no {names.texts()}")
    if html_field:
        record = {name: record.get(other) for other, name in NAMES.items()} | record
    id = _string(record, _field(record, names.id))
    title = _string(record, _field(record, names.title))
    about = _with_history(record)
    known = stated.known(about)
    if html_field:
        title, text, sections = _of_html(_string(record, html_field), title)
    elif text_field and isinstance(record[text_field], list):
        text, sections = _of_kilt(record[text_field], title)
    else:
        text, sections = _string(record, text_field), stated.section(stated.first_of(record, stated.SECTION_FIELDS))
    known |= {"fields": stated.declared(opened.fields, about), "sections": sections, "is_passage": is_passage}
    return opened.document(id or f"{opened.path}#{number}", title, text, **known)


def wanted(opened: Opened) -> set[str]:
    """What the columns of a document may be called."""
    names, about = opened.names, (*stated.URL_FIELDS, *stated.LANGUAGE_FIELDS, *stated.DATE_FIELDS)
    declared = (field.name for field in opened.fields)
    return {*names.id, *names.title, *names.text, *about, *stated.SECTION_FIELDS, *declared}


def check_columns(opened: Opened, columns: list[str]) -> None:
    """Raises Failed: a table, whose columns these are, has not what the user names, or two of one name to choose of."""
    opened.names.check(columns)
    if twice := sorted(name for name in wanted(opened) if columns.count(name) > 1):
        raise Failed(f"more than one column is called {', '.join(twice)}")


def _field(record: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if record.get(name) is not None), None)


def _string(record: dict[str, Any], field: str | None) -> str:
    if field is None:
        return ""
    value = record.get(field)
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise Failed(f"{field} must be a string, got {value!r:.80}")
    return str(value)


def _with_history(record: dict[str, Any]) -> dict[str, Any]:
    """KILT and BEIR have an object for what they know of a document."""
    inner = stated.first_of(record, ("history", "metadata"))
    return {**inner, **record} if isinstance(inner, dict) else record


def _of_kilt(paragraphs: list[Any], title: str) -> tuple[str, stated.Sections]:
    if not all(isinstance(each, str) for each in paragraphs):
        raise Failed("text must be a string or a list of strings")
    kept = paragraphs[1:] if paragraphs and paragraphs[0].strip() == title.strip() else paragraphs
    lines, sections, position = [_plain(paragraph) for paragraph in kept], [], 0
    for paragraph, line in zip(kept, lines, strict=True):
        if paragraph.startswith(KILT_SECTION):  # Section::::History.:Early years.
            names = (name.strip().removesuffix(".") for name in line.split(".:"))
            sections += [(position, path) for _, path in stated.section(" > ".join(names))]
        position += len(line) + 1
    return "\n".join(lines), tuple(sections)


def _of_html(page: str, title: str) -> tuple[str, str, stated.Sections]:
    if "<html" not in page[:4096].lower():  # a short one would be taken for none
        page = f"<html><body>{page}</body></html>"
    try:
        tree, text = web.parsed(page)
    except (Failed, MemoryError, ModuleNotFoundError):
        raise
    except Exception as error:  # one page is no reason to lose the others
        raise Failed(f"HTML that cannot be parsed: {one_line(str(error))}") from None
    headings = web.headings(tree)
    title = title or web.title_of(tree) or next((heading for _, heading in headings), "")
    return title, text, stated.sections_of(text, headings, title)


def _plain(paragraph: str) -> str:
    for mark in KILT_MARKS:
        paragraph = paragraph.removeprefix(mark)
    return paragraph.strip()
