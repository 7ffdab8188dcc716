"""HTML: the text of a page without its menus and footers, a document a page."""

import html
import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Any

from openbook.core.documents import Document, seen
from openbook.corpus.sources import stated
from openbook.corpus.sources.article import BLOCKS, readable, spell_formulas
from openbook.corpus.sources.encodings import as_browsers
from openbook.corpus.sources.limits import Failed
from openbook.corpus.sources.opened import Opened

_CUT = "boolean(" + "/*" * 256 + ")"
"""Whether it is as deep as libxml2 reads: of what is deeper, and behind it, it tells nothing."""
_UNHEARD = "//*[self::h1 or self::h2 or self::h3 or self::h4 or self::h5 or self::h6]//*[@aria-hidden = 'true']"
"""Links of headings to themselves, and pictures of formulas: trafilatura leaves them out."""
_SILENT = {"script", "style", "template", "noscript", "head"}
_OTHER_NAMES = {"url": "og:url", "date": "article:published_time", "published": "dc.date"}
_CODED = re.compile("&(?:amp|zwn?j|lrm|rlm|ZeroWidthSpace|NoBreak|#[0-9]{1,9}|#[xX][0-9a-fA-F]{1,9});")
_NUMBERED = re.compile("&(?:shy;|#(?:[0-9]{1,99}(?![0-9])|[xX][0-9a-fA-F]{1,99}(?![0-9a-fA-F]));?)")
_SPACES = dict.fromkeys(map(ord, "\x0b\x0c\x1c\x1d\x1e\x1f"), " ")
"""Control characters that are white space."""
_STAND_INS = [chr(code) for code in range(0x12000, 0x1236F)]
"""Signs of cuneiform: they are letters, and hardly ever in a page."""


def read(opened: Opened) -> Iterator[Document]:
    """Raises Failed: it is in another encoding than it says, or no text is found."""
    tree, text = parsed(as_browsers(opened.whole(), opened.crawled.charset))
    title = title_of(tree) or opened.stem
    meta = _meta(tree)
    known = stated.known(meta) | {"fields": stated.declared(opened.fields, meta)}
    yield opened.document(opened.path, title, text, sections=stated.sections_of(text, headings(tree), title), **known)


def parsed(page: str) -> tuple[Any, str]:
    """The tree of a page, its headings as they stand in the text, and the text. Raises Failed: there is none."""
    import trafilatura

    # Trafilatura would lose what browsers show for control characters, and nothing can be set to a text that has some.
    page = _NUMBERED.sub(_without_controls, seen(page).translate(_SPACES))
    tree = trafilatura.load_html(page)
    if tree is None:
        raise Failed("no HTML in it")
    if tree.xpath(_CUT):
        raise Failed("more than 255 elements within each other, behind which nothing is read")
    page, stood_in, unread = _shown(page)
    if (shown := trafilatura.load_html(page)) is None and seen(text_of(tree)).strip():  # read a moment ago
        raise MemoryError
    only = {"include_comments": False, "include_tables": True, "config": _also_short()}
    found = None if shown is None else trafilatura.extract(readable(shown, unread), **only)
    text = found.translate(stood_in) if found else seen(text_of(tree))
    lines = text.split("\n")
    text = "\n".join(line for line in lines if not line or not all(c.isspace() or _is_unseen(c) for c in line))
    if not text.strip():
        raise Failed("no text found")
    spell_formulas(tree)
    for unheard in tree.xpath(_UNHEARD):
        unheard.drop_tree()
    return tree, text


def _without_controls(coded: re.Match[str]) -> str:
    char = seen(html.unescape(coded[0]))
    if not char:
        return ""
    return " " if ord(char) in _SPACES else coded[0]


@cache
def _also_short() -> Any:
    """By itself trafilatura takes 250 letters or less for a failure, and makes one line of all of the page."""
    from trafilatura.settings import use_config

    config = use_config()
    config["DEFAULT"]["MIN_EXTRACTED_SIZE"] = "1"
    return config


def _shown(page: str) -> tuple[str, dict[int, str], str]:
    """The page with letters in place of what trafilatura leaves out or decodes once more, and what they stand for:
    characters that nobody sees, such as the joiners of Persian, and ampersands that are text; and one for nothing.
    """
    there, letters = set(page), dict[str, str]()
    taken = there | set(map(html.unescape, _CODED.findall(page)))
    free = (each for each in _STAND_INS if each not in taken)

    def letter(char: str) -> str:
        if char not in letters:
            letters[char] = next(free, char)
        return letters[char]

    def decoded(coded: re.Match[str]) -> str:
        char = html.unescape(coded[0])
        return letter(char) if char == "&" or _is_unseen(char) else coded[0]

    nothing = letter("")
    page = _CODED.sub(decoded, page)
    page = page.translate({ord(char): letter(char) for char in there if _is_unseen(char)})
    return page, {ord(letter): char for char, letter in letters.items() if letter}, nothing


def _is_unseen(char: str) -> bool:
    return unicodedata.category(char) == "Cf"


def title_of(tree: Any) -> str:
    """What a page says that it is called; empty if it does not."""
    return " ".join("".join(tree.xpath("string((//title)[1])")).split())


def headings(tree: Any) -> list[tuple[int, str]]:
    """All of them, each with its level."""
    found = tree.iter(*(f"{{*}}h{level}" for level in range(1, 7)))
    return [(int(each.tag[-1]), " ".join(text_of(each).split())) for each in found]


def _meta(tree: Any) -> dict[str, str]:
    """What a page states of itself, under the names that records have for it."""
    meta = {each.get("name") or each.get("property") or "": each.get("content") or "" for each in tree.iter("meta")}
    found = {name.lower(): value for name, value in meta.items()}
    for name, other in _OTHER_NAMES.items():
        if other in found:
            found.setdefault(name, found[other])
    found["language"] = tree.get("lang") or found.get("language", "")
    canonical = tree.xpath("string((//link[@rel='canonical']/@href)[1])")
    return {**found, "url": canonical or found.get("url", "")}


def text_of(tree: Any) -> str:
    """All text that a browser would show, a line a block."""
    parts: list[str] = []
    silent = None
    from lxml import etree

    for event, element in etree.iterwalk(tree, events=("start", "end", "comment", "pi")):
        if event in ("comment", "pi"):
            if silent is None:
                parts.append(element.tail or "")
            continue
        if element.tag is etree.Entity:
            if silent is None and event == "start":
                parts += html.unescape(element.text), element.tail or ""
            continue
        name = etree.QName(element).localname.lower() if isinstance(element.tag, str) else ""
        if silent is None and name not in _SILENT and (name in BLOCKS or name == "br"):
            parts.append("\n")
        if event == "start":
            if silent is None and name in _SILENT:
                silent = element
            if silent is None:
                parts.append(element.text or "")
        else:
            if silent is element:
                silent = None
            if silent is None and element is not tree:
                parts.append(element.tail or "")
    lines = (" ".join(line.split()) for line in "".join(parts).split("\n"))
    return "\n".join(line for line in lines if line)
