"""HTML: the text of a page without its menus and footers, a document a page."""

import html
import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Any

from openbook.core.documents import Document, seen
from openbook.corpus.sources import stated
from openbook.corpus.sources.encodings import as_browsers
from openbook.corpus.sources.limits import Failed
from openbook.corpus.sources.opened import Opened

_FRAME = ".//body//*[self::nav or self::footer or @role='navigation']"
_FOLDED = """.//*[self::h1 or self::h2 or self::h3 or self::h4 or self::h5 or self::h6 or self::dt or self::summary]
    [.//button]"""
_LEFT_OUT = (
    *("aside", "audio", "button", "canvas", "datalist", "dialog", "iframe", "map", "noscript", "object", "rp", "rt"),
    *("script", "select", "style", "svg", "template", "textarea", "video"),
)
"""Trafilatura would leave them out, too, but not notice that words before and behind are of one paragraph."""
_SHOWN_AS = {
    **dict.fromkeys(("blockquote", "figcaption", "figure", "hgroup", "legend", "search", "summary"), "div"),
    "menu": "ul",
}
"""What trafilatura would leave out, or its words, and what it does not."""
_MARKED = ".//*[self::article or self::main or @role='main'][not(ancestor::article)]"
"""An article in an article is a comment, or of another page."""
_LAYOUT = """.//table[.//table or .//pre or .//h1 or .//h2 or .//h3 or .//h4 or .//h5 or .//h6
    or not(.//th) and (.//ul or .//ol or .//dl)]"""
_STRAY = """.//*[self::caption or self::tbody or self::thead or self::tfoot or self::tr or self::th or self::td]
    [not(ancestor::table)] | .//li[not(ancestor::ul or ancestor::ol)] | .//*[self::dt or self::dd][not(ancestor::dl)]
    | .//table//*[self::ul or self::ol or self::dl or self::li or self::dt or self::dd] | .//fieldset"""
"""Of a list in a cell trafilatura would read nothing."""
_NAMED = "ancestor-or-self::*[contains(' td th li dt dd h1 h2 h3 h4 h5 h6 ', concat(' ', name(), ' '))]"
_HOLDERS = ("body", "article", "main", "section", "header", "div", "center", "details", "address")
"""Whose own words trafilatura would leave out."""
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote body caption center dd details dialog div dl dt fieldset figcaption figure "
        "footer form h1 h2 h3 h4 h5 h6 header hgroup hr legend li main menu nav ol p pre search section summary table "
        "tbody td tfoot th thead tr ul",
    )
)
"""What begins a line in browsers; all else is within one, whatever it is."""
_INLINE = ("a", "br", "code", "math", "span")
"""What trafilatura treats as more than words, or by its classes. All else within a line is a span to it."""
_LETTER = re.compile(r"[^\W_]")
_OVERFLOW = re.compile(r"overflow[\w-]*\s*:[^;]*")
_SILENT = {"script", "style", "template", "noscript", "head"}
_OTHER_NAMES = {"url": "og:url", "date": "article:published_time", "published": "dc.date"}
_CODED = re.compile("&(?:amp|zwn?j|lrm|rlm|ZeroWidthSpace|NoBreak|#[0-9]{1,9}|#[xX][0-9a-fA-F]{1,9});")
_SOFT_HYPHEN = re.compile("&(?:shy|#0*173|#[xX]0*[aA][dD]);")
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
    """The tree of a page, and its text. Raises Failed: there is none."""
    import trafilatura

    page = _SOFT_HYPHEN.sub("", seen(page))  # trafilatura would lose what browsers show for control characters
    tree = trafilatura.load_html(page)
    if tree is None:
        raise Failed("no HTML in it")
    page, stood_in, unread = _shown(page)
    if (shown := trafilatura.load_html(page)) is None and seen(text_of(tree)).strip():  # read a moment ago
        raise MemoryError
    only = {"include_comments": False, "include_tables": True, "config": _also_short()}
    found = None if shown is None else trafilatura.extract(_marked(shown, unread), **only)
    text = found.translate(stood_in) if found else seen(text_of(tree))
    lines = text.split("\n")
    text = "\n".join(line for line in lines if not line or not all(c.isspace() or _is_unseen(c) for c in line))
    if not text.strip():
        raise Failed("no text found")
    return tree, text


@cache
def _also_short() -> Any:
    """By itself trafilatura takes 250 letters or less for a failure, and makes one line of all of the page."""
    from trafilatura.settings import use_config

    config = use_config()
    config["DEFAULT"]["MIN_EXTRACTED_SIZE"] = "1"
    return config


def _marked(tree: Any, unread: str) -> Any:
    """The tree without what frames it, of so few kinds of elements that trafilatura leaves out nothing else: its body
    is the article, whole where nothing marks one, or several or a small part are marked; words between blocks are
    paragraphs.
    """
    from trafilatura.utils import RE_FILTER
    from trafilatura.xpaths import BODY_XPATH

    if tree.tag != "html":  # a part of a page
        tree, part = tree.makeelement("html"), tree
        tree.append(body := tree.makeelement("body"))
        body.append(part)
    if (body := tree.find("body")) is None:
        return tree
    for named in body.xpath(_FOLDED):
        if not any(map(_LETTER.search, named.xpath(".//text()[not(ancestor::button)]"))):
            for button in list(named.iter("button")):
                button.drop_tag()
    for frame in [*tree.xpath(_FRAME), *body.iter(*_LEFT_OUT)]:
        frame.drop_tree()
    half = _n_letters(body) / 2
    for form in body.xpath(".//form"):  # one for a search or a login, or one around all that there is
        _rename(form, "div") if _n_letters(form) > half else form.drop_tree()
    if not (marked := tree.xpath(_MARKED)):
        by_class = next((found for mark in BODY_XPATH if (found := mark(tree))), [])
        marked = by_class[:1] if all(by_class[0] in each.iterancestors() for each in by_class[1:]) else []
    half = _n_letters(body) / 2  # forms may be gone
    beside = "preceding-sibling::* | following-sibling::*"  # of a thread or of a blog all are one page
    large = [each for each in marked if _n_letters(each) > half and set(marked).isdisjoint(each.xpath(beside))]
    if large:
        article = large[-1]
        article.tag, article.tail = "article", None
        article.attrib.clear()
    else:
        article = body.makeelement("article")
        article.text = body.text
        article.extend(body[:])
    body.text, body[:] = None, [article]
    article.set("class", "post")  # the first that trafilatura looks for; else one within it would be all
    for caption in article.xpath(".//*[contains(@class, 'caption') or contains(@id, 'caption')]"):
        _rename(caption, caption.tag)
    for name, shown in _SHOWN_AS.items():
        for element in article.iter(name):
            _rename(element, shown)
    for cut in article.xpath(".//*[contains(@style, 'overflow')]"):  # "hidden" is of what does not fit
        cut.set("style", _OVERFLOW.sub("", cut.get("style")))
    for code in article.xpath(".//code[not(ancestor::pre)]"):  # else it may be a block
        code.tag = "span"
    for caption in article.xpath(".//table/caption"):
        caption.getparent().addprevious(caption)
    for table in article.xpath(_LAYOUT):
        table.tag = "div"
    for stray in article.xpath(_STRAY):
        stray.tag = "div"
    holding = set()
    for element in reversed(article.xpath(".//*[not(ancestor::math)]")):
        if element.tag in _BLOCKS or element in holding:
            holding.add(element.getparent())
        elif element.tag not in _INLINE:
            _rename(element, "span")
    for element in holding:  # what holds blocks is one
        if element.tag == "p" or element.tag not in (*_BLOCKS, "a"):
            element.tag = "div"
    for holder in [*article.iter(*_HOLDERS), *(each for each in holding if each.tag in ("a", "td", "th"))]:
        _part(holder, holding)
    has_words = dict[Any, bool]()  # a block: where links are not all that it is, or have no words, they are words, too
    for link in list(article.iter("a")):
        if (block := next(link.iterancestors(*_BLOCKS))) not in has_words:
            has_words[block] = any(map(_LETTER.search, block.xpath(".//text()[not(ancestor::a)]")))
        if has_words[block] or not link.text_content().strip():
            _rename(link, "span")
    for table in article.xpath(".//table[.//a]"):  # else a cell loses a block that is a link
        if _n_letters(table) > len("".join(table.text_content().split())) / 2:
            for link in list(table.iter("a")):
                _rename(link, "span")
    for block in article.xpath(".//div[.//a]"):  # else one with a paragraph that is a link is left out, if it is short
        if _n_letters(block) > len("".join(block.text_content().split())) / 5:
            block.tag = "section"  # in which trafilatura looks for no links
    for text in article.xpath(".//text()"):
        if RE_FILTER.match(name := text.strip()) and text.getparent().xpath(_NAMED):  # else left out: Google, Print
            setattr(text.getparent(), "tail" if text.is_tail else "text", text.replace(name, name + unread))
    return tree


def _rename(element: Any, tag: str) -> None:
    element.tag = tag
    for name in ("class", "id"):  # for which trafilatura would leave out some of its new name
        element.attrib.pop(name, None)


def _n_letters(element: Any) -> int:
    texts = element.xpath(".//text()[not(ancestor::a)]")  # menus are links
    return sum(len(word) for text in texts for word in text.split())


def _part(block: Any, holding: set[Any]) -> None:
    """Make paragraphs of the words and the inline elements that stand in a block itself."""
    inside: list[Any] = []

    def paragraph(text: str | None) -> Any:
        made = block.makeelement("p")
        made.text = text
        inside.append(made)
        return made

    last = paragraph(block.text)
    block.text = None
    for child in block[:]:
        if child.tag in _BLOCKS or child in holding:
            inside.append(child)
            last = paragraph(child.tail)
            child.tail = None
        else:
            last.append(child)
    block[:] = [each for each in inside if each.tag != "p" or len(each) or (each.text or "").strip() or each.attrib]


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
        if not char:  # of &#1;, for which trafilatura gives up a page
            return ""
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
        if silent is None and name not in _SILENT and (name in _BLOCKS or name == "br"):
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
