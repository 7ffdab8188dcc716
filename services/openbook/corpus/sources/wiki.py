"""MediaWiki's XML dumps: a document for each article; redirects and pages about pages are left out."""

import html
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from openbook.core.documents import Document
from openbook.corpus.sources import stated
from openbook.corpus.sources.article import delimited
from openbook.corpus.sources.limits import Failed, Failure
from openbook.corpus.sources.opened import Opened

FILES, CATEGORIES = "6", "14"
_MARKS = re.compile(r"__[A-Z]+__|'{2,}")  # switches; bold and italic, which need no parser
_UNREAD = ("ref", "references")  # beside those of which mwparserfromhell tells no text


def read(opened: Opened) -> Iterator[Document | Failure | None]:
    """None for each page that is no article. What lxml raises of XML that is cut off or none comes through."""
    from lxml import etree

    pages = etree.iterparse(
        opened.file,
        tag=("{*}page", "{*}namespace", "{*}base"),
        resolve_entities=False,
        no_network=True,
        load_dtd=False,
        huge_tree=False,
    )
    hidden = {"file", "image", "category"}
    folder = ""
    n_pages = 0
    for _, element in pages:
        if etree.QName(element).localname == "base":
            folder = (element.text or "").rpartition("/")[0]
            continue
        if etree.QName(element).localname == "namespace":
            if element.get("key") in (FILES, CATEGORIES) and element.text:
                hidden.add(element.text.strip().lower())
            continue
        n_pages += 1
        try:
            names = tuple(f"{name}:" for name in sorted(hidden))
            yield _document(opened, element, names, folder) if n_pages > opened.n_passed else None
        except Failed as error:
            yield Failure(f"{opened.path}:{element.sourceline}", str(error))
        element.clear()
        while element.getprevious() is not None:  # else the tree would grow with the dump
            del element.getparent()[0]


def _document(opened: Opened, page: Any, hidden: tuple[str, ...], folder: str) -> Document | None:
    import mwparserfromhell

    if page.findtext("{*}ns") != "0" or page.find("{*}redirect") is not None:
        return None
    revision = page.find("{*}revision[last()]")  # of dumps with all of them the newest
    if revision is None:
        return None
    wikitext = revision.findtext("{*}text") or ""
    try:
        code = mwparserfromhell.parse(wikitext, skip_style_tags=True)
        for link in code.filter_wikilinks(matches=lambda link: str(link.title).strip().lower().startswith(hidden)):
            _remove(code, link)
        for tag in code.filter_tags():
            if (name := str(tag.tag).strip().lower()) in _UNREAD:
                _remove(code, tag)
            elif name == "math" and tag.contents:
                _spell(tag)
        headings = [(each.level, _plain(each.title)) for each in code.filter_headings()]
        text = _plain(code)
    except (ValueError, RecursionError, mwparserfromhell.parser.ParserError) as error:
        raise Failed(f"wikitext that cannot be parsed: {error}") from None
    id, title = page.findtext("{*}id") or "", page.findtext("{*}title") or ""
    known = stated.known(
        {
            "url": f"{folder}/{quote(title.replace(' ', '_'))}",
            "language": page.getparent().get("{http://www.w3.org/XML/1998/namespace}lang"),
            "date": revision.findtext("{*}timestamp"),
        }
    )
    return opened.document(id, title, text, sections=stated.sections_of(text, headings, title), **known)


def _plain(code: Any) -> str:
    """Without markup. Entities come last: apostrophes that are written so are text."""
    return html.unescape(_MARKS.sub("", code.strip_code(normalize=False)))


def _spell(formula: Any) -> None:
    """Make text of it: its LaTeX as that of a page of HTML, of which nothing is taken for markup later."""
    from mwparserfromhell.nodes import Text

    display = str(formula.get("display").value).strip() if formula.has("display") else None
    latex = delimited(" ".join(str(formula.contents).split()), display)
    formula.tag, formula.contents = "span", Text(html.escape(latex))


def _remove(code: Any, node: Any) -> None:
    with suppress(ValueError):  # it went with another that it was part of
        code.remove(node)
