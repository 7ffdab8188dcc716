"""The article of a page of HTML, made up such that trafilatura reads all of it."""

import re
from typing import Any

_FRAME = ".//*[self::nav or self::footer or @role='navigation']"
_FOLDED = """.//*[self::h1 or self::h2 or self::h3 or self::h4 or self::h5 or self::h6 or self::dt or self::summary]
    [.//button]"""
_NOTE = """.//aside[contains(@class, 'footnote') or @role = 'note' or starts-with(@class, 'quote')
    or starts-with(@role, 'doc-') and not(@role = 'doc-pullquote' or @role = 'doc-toc')
    or starts-with(@class, 'starlight-aside')]"""
"""Footnotes of Sphinx and pandoc, quotations of Discourse, notes of Starlight."""
_LEFT_OUT = (
    *("aside", "audio", "canvas", "datalist", "dialog", "iframe", "map", "noscript", "object", "rp", "rt"),
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
    | .//*[self::ul or self::ol or self::dl or self::li or self::dt or self::dd][ancestor::table] | .//fieldset"""
"""Of a list in a cell trafilatura would read nothing. (`.//table//*` would take time with the square of the tables.)"""
_NAMED = "ancestor-or-self::*[contains(' td th li dt dd h1 h2 h3 h4 h5 h6 ', concat(' ', name(), ' '))]"
_NOWHERE = """self::*[@name and not(@href) or not(ancestor::li)][not(@href != '') or @*[. = 'collapse']
    or (starts-with(@href, '#') or starts-with(@href, 'javascript:'))
    and ancestor::*[contains('h1 h2 h3 h4 h5 h6', name())]]"""
"""As links do which unfold the text below; those of a list are of a menu or a table of contents."""
_HOLDERS = ("body", "article", "main", "section", "header", "div", "center", "details", "address")
"""Whose own words trafilatura would leave out."""
BLOCKS = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote body caption center dd details dialog div dl dt fieldset figcaption figure "
        "footer form h1 h2 h3 h4 h5 h6 header hgroup hr legend li main menu nav ol p pre search section summary table "
        "tbody td tfoot th thead tr ul",
    )
)
"""What begins a line in browsers; all else is within one, whatever it is."""
_INLINE = ("a", "br", "code", "span")
"""What trafilatura treats as more than words, or by its classes. All else within a line is a span to it."""
_PREFIXED = "descendant::*[substring-after(name(), ':') = 'math']"
_LATEX = "string(.//annotation[@encoding = 'application/x-tex'])"
_SIGNS = ".//text()[not(ancestor::annotation or ancestor::annotation-xml)]"
_STYLED = re.compile(r"\{\\(?:display|text)style (.*)\}", re.S)
_BRACE = re.compile(r"\\.|[{}]", re.S)  # or what is escaped, which is none
_LETTER = re.compile(r"[^\W_]")
_OVERFLOW = re.compile(r"overflow[\w-]*\s*:[^;]*")


def readable(tree: Any, unread: str) -> Any:
    """The tree without what frames it, of so few kinds of elements that trafilatura leaves out nothing else: its body
    is the article, whole where nothing marks one, or several beside one another or a small part are marked; words
    between blocks are paragraphs. With a letter that nobody is to read in names that trafilatura takes for buttons.
    """
    if tree.tag != "html":  # a part of a page
        tree, part = tree.makeelement("html"), tree
        tree.append(body := tree.makeelement("body"))
        body.append(part)
    if (body := tree.find("body")) is not None:
        _take_frame(body)
        article = _found(body)
        body.text, body[:] = None, [article]
        _rename_kinds(article)
        _make_paragraphs(article)
        _keep_links(article)
        _keep_names(article, unread)
    return tree


def _take_frame(body: Any) -> None:
    """Leave out what is no text of the page."""
    spell_formulas(body)
    for note in body.xpath(_NOTE):
        _rename(note, "div")
    for frame in dict.fromkeys([*body.xpath(_FRAME), *body.iter(*_LEFT_OUT)]):  # an aside may have the role of a nav
        frame.drop_tree()
    for named in body.xpath(_FOLDED):  # now that no icon has a name
        if not any(map(_LETTER.search, named.xpath(".//text()[not(ancestor::button)]"))):
            for button in list(named.iter("button")):
                button.drop_tag()
    for button in list(body.iter("button")):
        button.drop_tree()
    forms = body.xpath(".//form")  # for a search or a login, or around all that there is or each part of it
    hold_most = sum(map(_n_letters, forms)) > _n_letters(body) / 2
    for form in forms:
        _rename(form, "div") if hold_most else form.drop_tree()


def spell_formulas(tree: Any) -> None:
    """As LaTeX, where the page has it, else by their signs. Wikipedia hides them behind pictures. (Trafilatura knows
    LaTeX, if it is not hidden, and no signs; it leaves out pictures of letters, as KaTeX and MathJax show them.)
    """
    _take_prefixes(tree)
    for formula in reversed(list(tree.iterdescendants("math"))):  # of one within another the inner first
        if _has_picture(formula):
            formula.getparent().attrib.pop("style", None)
        if next(formula.iter(*BLOCKS), None) is None:
            _spell(formula)
        else:  # it was never closed, and what follows is in it
            formula.tag = "span"


def _take_prefixes(tree: Any) -> None:
    """Call formulas and what is in them as MathML does, where a page has them in a namespace of its own: `m:math`."""
    for formula in tree.xpath(_PREFIXED):
        prefix = formula.tag.removesuffix("math")
        for element in formula.iter() if prefix else ():  # else it is within another, and was called so with that
            if isinstance(element.tag, str):
                element.tag = element.tag.removeprefix(prefix)


def _has_picture(formula: Any) -> bool:
    """Whether something is shown in its place: behind an element that has nothing but the formula."""
    holder = formula.getparent()
    is_alone = formula.getprevious() is None and formula.getnext() is None
    picture = holder.getnext() if is_alone and not ((holder.text or "") + (formula.tail or "")).strip() else None
    return picture is not None and picture.get("aria-hidden") == "true"


def _spell(formula: Any) -> None:
    latex = (formula.xpath(_LATEX) or formula.get("alttext") or "").strip()
    if (styled := _STYLED.fullmatch(latex)) and _is_one_group(latex):
        latex = styled[1]
    words = delimited(latex, formula.get("display")) if latex else "".join(formula.xpath(_SIGNS))
    formula[:] = ()
    formula.attrib.clear()
    formula.tag, formula.text = "span", " ".join(words.split())


def _is_one_group(latex: str) -> bool:
    """Whether its first brace, with which it begins, is closed by its end and not before."""
    depth = 0
    for brace in _BRACE.finditer(latex):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return brace.end() == len(latex)
    return False


def delimited(latex: str, display: str | None) -> str:
    """A formula as it stands in a text, in a line or a block of its own."""
    return rf"\[{latex}\]" if display == "block" else rf"\({latex}\)"


def _found(body: Any) -> Any:
    """The article, which is no longer in the body."""
    marked = body.xpath(_MARKED) or _marked_by_class(body)
    places = [[above.tag for above in each.iterancestors()] for each in marked]
    article, least = None, _n_letters(body) / 2
    for each, place in zip(marked, places, strict=True):
        if _n_letters(each) > least and places.count(place) == 1:  # of a thread or of a blog all are one page
            article, least = each, _n_letters(each) * 4 / 5
    if article is not None:
        article.tag = "article"
    else:
        article = body.makeelement("article")
        article.text = body.text
        article.extend(body[:])
    article.set("class", "post")  # the first that trafilatura looks for; else one within it would be all
    return article


def _marked_by_class(body: Any) -> list[Any]:
    """The element that blogs and wikis mark, which others may be in; none if others are beside it: posts, columns."""
    from trafilatura.xpaths import BODY_XPATH

    for mark in BODY_XPATH:
        if found := mark(body):
            break
    else:
        return []
    first, kinds = set(found), set[str]()  # the first of each parent, or of all
    for tag, kind in {(each.tag, each.get("class", "")) for each in found}:
        alone = body.makeelement("body")
        alone.append(body.makeelement(tag, {"class": kind}))
        if mark(alone):  # else it was marked by its id or role, and others of its class are anything
            kinds.add(kind)
    blocks = body.iterdescendants("article", "div", "main", "section")
    every = [each for each in blocks if each in first or each.get("class") in kinds]
    return every[:1] if all(every[0] in each.iterancestors() for each in every[1:]) else []


def _rename_kinds(article: Any) -> None:
    """Call blocks that trafilatura would leave out, or take for what they are not, by names that it reads."""
    for caption in article.xpath(".//*[contains(@class, 'caption') or contains(@id, 'caption')]"):
        _rename(caption, caption.tag)
    for name, shown in _SHOWN_AS.items():
        for element in article.iter(name):
            _rename(element, shown)
    for cut in article.xpath(".//*[contains(@style, 'overflow')]"):  # "hidden" is of what does not fit
        cut.set("style", _OVERFLOW.sub("", cut.get("style")))
    for code in article.xpath(".//code[not(ancestor::pre)]"):  # else it may be a block
        code.tag = "span"
    for code in article.iter("pre"):  # else two that have a line each are one
        code.text = f"\n{code.text or ''}"
    for caption in article.xpath(".//table/caption"):
        caption.getparent().addprevious(caption)
    for table in article.xpath(_LAYOUT):
        table.tag = "div"
    for stray in article.xpath(_STRAY):
        stray.tag = "div"


def _make_paragraphs(article: Any) -> None:
    """Of words that stand between blocks; and of an element within a line that holds blocks, a block."""
    holding = set()
    for element in reversed(article.xpath(".//*")):
        if element.tag in BLOCKS or element in holding:
            holding.add(element.getparent())
        elif element.tag not in _INLINE:
            _rename(element, "span")
    for element in holding:
        if element.tag == "p" or element.tag not in (*BLOCKS, "a"):
            element.tag = "div"
    for holder in [*article.iter(*_HOLDERS), *(each for each in holding if each.tag in ("a", "td", "th"))]:
        _part(holder, holding)


def _keep_links(article: Any) -> None:
    """Links are words where they are not all of a block, or lead nowhere: trafilatura would leave out the block."""
    has_words = dict[Any, bool]()
    for link in list(article.iter("a")):
        if (block := next(link.iterancestors(*BLOCKS))) not in has_words:
            has_words[block] = any(map(_LETTER.search, block.xpath(".//text()[not(ancestor::a)]")))
        if has_words[block] or link.xpath(_NOWHERE):
            _rename(link, "span")
    for rows in article.xpath(".//*[self::table or self::ul or self::ol or self::dl][.//a]"):  # else all of them may go
        if rows.xpath("self::table[.//th]") or _share_unlinked(rows) > 1 / 5:
            for link in list(rows.iter("a")):
                _rename(link, "span")
    for block in article.xpath(".//div[.//a]"):  # else one with a paragraph that is a link is left out, if it is short
        if _share_unlinked(block) > 1 / 5:
            block.tag = "section"  # in which trafilatura looks for no links


def _keep_names(article: Any, unread: str) -> None:
    """Put the letter behind cells, items and headings such as Google or Print, which would be left out."""
    from trafilatura.utils import RE_FILTER

    for text in article.xpath(".//text()"):
        if RE_FILTER.match(name := text.strip()) and text.getparent().xpath(_NAMED):
            setattr(text.getparent(), "tail" if text.is_tail else "text", text.replace(name, name + unread))


def _rename(element: Any, tag: str) -> None:
    element.tag = tag
    for name in ("class", "id"):  # for which trafilatura would leave out some of its new name
        element.attrib.pop(name, None)


def _n_letters(element: Any) -> int:
    texts = element.xpath(".//text()[not(ancestor::a)]")  # menus are links
    return sum(len(word) for text in texts for word in text.split())


def _share_unlinked(element: Any) -> float:
    """Of its letters."""
    return _n_letters(element) / max(1, len("".join(element.text_content().split())))


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
        if child.tag in BLOCKS or child in holding:
            inside.append(child)
            last = paragraph(child.tail)
            child.tail = None
        else:
            last.append(child)
    block[:] = [each for each in inside if each.tag != "p" or len(each) or (each.text or "").strip() or each.attrib]
