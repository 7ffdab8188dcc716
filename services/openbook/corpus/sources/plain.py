"""Plain text and Markdown: a document a file."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from openbook.core.documents import Document
from openbook.corpus.sources import stated, web
from openbook.corpus.sources.encodings import as_browsers, decoded
from openbook.corpus.sources.limits import Failed
from openbook.corpus.sources.opened import Opened
from openbook.corpus.sources.recognise import check_no_codes

if TYPE_CHECKING:
    from markdown_it.token import Token

BETWEEN = "\n\n"
_HEADING = re.compile("h[1-6]")
_FIELD = re.compile(r"^\s*\w[\w -]*:", re.MULTILINE)
_OF_NO_TEXT = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")
FRONT_MATTER = re.compile(r"---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)


def read_text(opened: Opened) -> Iterator[Document]:
    """A title it has of its file's name. Raises Failed: it is of many mails, and one of them is in codes."""
    text = _decoded(opened, opened.whole())
    check_no_codes(text.lstrip().encode())
    yield opened.document(opened.path, opened.stem, text)


def read_markdown(opened: Opened) -> Iterator[Document]:
    """What a reader sees: no marks, no tags, no addresses of links. The title is that of the front matter, or the
    first heading of the first level, which then is no part of the text, or that of the file.

    Raises:
        Failed: it has content, and no text in it.
    """
    from markdown_it import MarkdownIt

    stated_there, text = _parted(_decoded(opened, opened.whole()))
    named = stated_there.get("title")
    title = "" if named is None or isinstance(named, (list, dict)) else str(named)  # aliases make huge ones of a line
    tokens = MarkdownIt().enable("table").parse(text)
    blocks = list(_blocks(tokens))
    if not title and (first := next((block for block in blocks if block[0] == "h1"), None)):
        title = first[1]
        blocks.remove(first)
    if text.strip() and not any(block.strip() for _, block in blocks):
        raise Failed("no text found")
    outline, position = stated.Outline(title), 0
    for tag, block in blocks:
        if _HEADING.fullmatch(tag):
            outline.add(position, int(tag[1]), block)
        position += len(block) + len(BETWEEN)
    known = stated.known(stated_there) | {"fields": stated.declared(opened.fields, stated_there)}
    text = BETWEEN.join(text for _, text in blocks)
    yield opened.document(opened.path, title or opened.stem, text, sections=outline.sections, **known)


def _decoded(opened: Opened, content: bytes) -> str:
    """UTF-8 or UTF-16, or else what its server said, if that gives a text. Raises Failed."""
    try:
        return decoded(content)
    except Failed:
        if not opened.crawled.charset or _is_cut(content):
            raise
        text = as_browsers(content, opened.crawled.charset)
        if _OF_NO_TEXT.search(text.rstrip("\x1a")):  # the end of a text of DOS; most charsets take any bytes
            raise
        return text


def _is_cut(content: bytes) -> bool:
    """Whether it is UTF-8, which nothing else with more than ASCII in it looks like, to a last character of parts."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and not content[: error.start].isascii()
    return False


def _parted(text: str) -> tuple[dict[str, Any], str]:
    """What a file's front matter states, and the text behind it. Words between two rules are text, but where they are
    of the form `name: value`, though damaged.
    """
    if not (front := FRONT_MATTER.match(text)):
        return {}, text
    try:
        fields = yaml.safe_load(front[1])
    except (yaml.YAMLError, ValueError):
        fields = None
    if not (isinstance(fields, dict) or (fields is None and (not front[1].strip() or _FIELD.search(front[1])))):
        return {}, text
    return {str(name): value for name, value in (fields or {}).items()}, text[front.end() :]


def _blocks(tokens: "list[Token]") -> Iterator[tuple[str, str]]:
    """The blocks of text, each with the tag around it; a table's row is one."""
    tag = ""
    row: list[str] | None = None
    for token in tokens:
        if token.type == "tr_open":
            row = []
        elif token.type == "tr_close" and row is not None:
            yield "tr", " | ".join(row)
            row = None
        elif token.nesting == 1:
            tag = token.tag
        elif token.type == "inline":
            text = _inline(token.children or [])
            if row is not None:
                row.append(text)
            elif text:
                yield tag, text
        elif token.type in ("fence", "code_block"):
            yield "code", token.content
        elif token.type == "html_block" and (text := _shown(token.content)):
            yield "html", text


def _shown(part: str) -> str:
    """What a browser shows of a part of a page."""
    from lxml import etree, html

    try:
        return web.text_of(html.document_fromstring(part))  # as a fragment, one with <html> in it fails
    except etree.ParserError:  # nothing is in it
        return ""


def _inline(tokens: "list[Token]") -> str:
    breaks = {"softbreak": "\n", "hardbreak": "\n"}
    shown = ("text", "code_inline", "image")  # an image's content is what stands for it
    return "".join(breaks.get(token.type) or (token.content if token.type in shown else "") for token in tokens)
