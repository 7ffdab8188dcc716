"""What is read of a page: all that it says, once, in its order; and nothing of its frame."""

import random
import re
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

pytest.importorskip("trafilatura")

from lxml import etree, html

from openbook.corpus.sources.article import _rename_kinds, spell_formulas
from openbook.corpus.sources.limits import Failed
from openbook.corpus.sources.web import headings, parsed

LINE = "The river flows past the old stone house, and people walk along it every day in summer."
CONTENT = f"""<h2>w1</h2><p>{LINE} w2 <em>w3</em></p><ul><li>w4</li><li>w5</li></ul><h2>w6</h2><div>w7 <b>w8</b></div>
<dl><dt>w9</dt><dd>w10</dd></dl><figure><img src=a.png><figcaption>w11</figcaption></figure><p>{LINE} w12</p>"""
FRAME = "<nav><ul><li><a href=/>menu</a></li></ul></nav><div role=navigation>menu</div>{}<footer>menu</footer>"


def words_of(page: str) -> list[int]:
    _, text = parsed(page)
    assert "menu" not in text
    return [int(number) for number in re.findall(r"\bw(\d+)\b", text)]


@pytest.mark.parametrize(
    "made",
    [
        "<html><body>{}</body></html>",
        "<html><body><article>{}</article></body></html>",
        f"<html><body><article><p>{LINE} w0</p></article>{{}}</body></html>",
        "<html><body><main><article><p>w0</p></article>{}</main></body></html>",
        "<html><body><section>{}</section></body></html>",
        "<html><body><center>{}</center></body></html>",
        "<html><body><table><tr><td>{}</td></tr></table></body></html>",
        "<html><body><form action=a.aspx>{}</form></body></html>",
        '<html><body><header id="title-block-header"><h1>w0</h1></header>{}</body></html>',  # pandoc
        "<html><body><div class=WordSection1>{}</div></body></html>",
        '<html><body class="doc-content">{}</body></html>',  # Google Docs
        '<html><body><div class="contents"><div class="textblock">{}</div></div></body></html>',  # Doxygen
        '<html><body><div class="main-container"><div class="section level2">{}</div></div></body></html>',  # knitr
        '<html><body><div class="book"><div class="chapter">{}</div></div></body></html>',  # DocBook
        "{}",
        '<html><body><div class="article-text"><p>w0</p></div>{}</body></html>',
        '<html><body><div role=main><h1>w0</h1><div class="page-content">{}</div></div></body></html>',
        "<html><body role=main>{}</body></html>",
        "<html><body class=post>{}</body></html>",
        "<html><body class=post><div class=post><p>w0</p></div>{}</body></html>",
        "<html><body><table><tr><td role=main>{}</td></tr></table></body></html>",
        "<html><body><div><div class=post><p>w0</p></div><div class=post>{}</div></div></body></html>",
        *(
            f"<html><body><{around}><article><div class=entry-content><p>w0</p></div></article><article>"
            f"<div class=entry-content>{{}}</div></article></{around}></body></html>"
            for around in ("div", "main")
        ),
    ],
)
def test_a_page_loses_nothing_but_its_frame_whatever_it_was_made_by(made: str) -> None:
    expected = [*([0] if "w0" in made else []), *range(1, 13)]
    assert words_of(made.format(FRAME.format(CONTENT))) == expected


SIMPLE = """<p>{}</p>,<div>{}</div>,<span>{}</span>,{},<pre>{}</pre>,<h3>{}</h3><p>x</p>
<blockquote><p>{}</p></blockquote>,<ul><li>{}</ul>,<ul><li>a<p>{}</p></ul>,<dl><dt>a<dd>{}</dl>,<table><tr><td>{}</table>
<table><tr><td><ul><li>{}</ul></table>"""
NESTED = """<div>{words}{block}{words}</div>,<section>{block}{block}</section>
<article>{block}</article><article>{block}</article>,<details><summary>{words}</summary>{block}</details>,<span>{words}<div>{block}</div></span>"""
AROUND = ["{}", "<main>{}</main>", "<article>{}</article>", "<div id=content>{}</div>"]


def test_blocks_of_a_page_are_read_once_and_in_their_order() -> None:
    chance = random.Random(7)

    def words() -> str:
        said = f" w {LINE[: chance.randint(0, len(LINE))]} "
        return chance.choice(
            ["{}", "<span>{}</span>", "some <b>{}</b>", "<time>{}</time> some", "a <my-tag>{}</my-tag>"]
        ).format(said)

    def block(depth: int = 0) -> str:
        if depth == 2 or chance.random() < 0.7:
            return chance.choice(re.split(r"[,\n]", SIMPLE)).format(words())
        shape = chance.choice(re.split(r"[,\n]", NESTED))
        return re.sub("{words}|{block}", lambda each: words() if "w" in each[0] else block(depth + 1), shape)

    for _ in range(30):
        blocks = "".join(block() for _ in range(chance.randint(1, 9)))
        numbers = count()
        blocks = re.sub(r"\bw\b", lambda _: f"w{next(numbers)}", blocks)  # noqa: B023
        page = f"<html><body>{FRAME.format(chance.choice(AROUND).format(blocks + '<p>The end.</p>'))}</body></html>"
        assert words_of(page) == list(range(next(numbers))), page


SIGNS = "<mrow><mi>E</mi><mo>=</mo><mi>m</mi></mrow>"
TEX = "<annotation encoding='application/x-tex'>E=m</annotation>"
DISPLAYED = "<annotation encoding='application/x-tex'>{\\displaystyle E=m}</annotation>"
PREFIXED = re.sub("<(/?)", r"<\1m:", SIGNS + TEX)
PICTURE = "<img class=mwe-math-fallback-image-inline aria-hidden=true alt='E=m' src=a.svg>"


@pytest.mark.parametrize(
    ("formula", "read"),
    [
        (f"<math>{SIGNS}</math>", "E=m"),
        ("<math alttext='E=m'><mrow><mi>E</mi><mo>(=)</mo></mrow></math>", r"\(E=m\)"),  # arXiv's
        (
            "<span class=mwe-math-element><span class=mwe-math-mathml-inline style='display: none;'>"
            f"<math alttext='{{E}}'><semantics>{SIGNS}{DISPLAYED}</semantics></math></span>{PICTURE}</span>",
            r"\(E=m\)",  # Wikipedia's
        ),
        (
            f"<span class=katex><span class=katex-mathml><math display=block><semantics>{SIGNS}{TEX}</semantics></math>"
            "</span><span class=katex-html aria-hidden=true><span class=base><b>E</b>m</span></span></span>",
            r"\[E=m\]",
        ),
        (
            "<mjx-container><svg><g></g></svg><mjx-assistive-mml unselectable=on display=inline>"
            f"<math>{SIGNS}</math></mjx-assistive-mml></mjx-container>",
            "E=m",  # MathJax's
        ),
        (
            "<span class=MathJax data-mathml='<math></math>'><nobr aria-hidden=true><span>E</span></nobr>"
            f"<span class=MJX_Assistive_MathML role=math><math>{SIGNS}</math></span></span><script>E=m</script>",
            "E=m",  # before its third version
        ),
        (f"<math><math>{SIGNS}</math></math>", "E=m"),
        (f"<math><semantics>{SIGNS}<annotation encoding='StarMath 5.0'>E = m</annotation></semantics></math>", "E=m"),
        (f"<math alttext='{{\\textstyle E}}'>{SIGNS}</math>", r"\(E\)"),
        (r"<math alttext='{\displaystyle a}+{b}'></math>", r"\({\displaystyle a}+{b}\)"),  # of a part alone
        (r"<math alttext='{\displaystyle {a}+\}{b}}'></math>", r"\({a}+\}{b}\)"),
        (r"<math alttext='{\displaystyle a\}'></math>", r"\({\displaystyle a\}\)"),  # never closed
        ("<math style='display: none' alttext=' E=m '></math>", r"\(E=m\)"),
        (f"<m:math><m:semantics>{PREFIXED}</m:semantics></m:math>", r"\(E=m\)"),
        (f"<m:math>{PREFIXED.partition('<m:a')[0]}</m:math>", "E=m"),
        (f"<m:math alttext='a'><m:math><m:semantics>{PREFIXED}</m:semantics></m:math></m:math>", r"\(a\)"),
    ],
)
def test_formulas_are_read_as_latex_or_by_their_signs(formula: str, read: str) -> None:
    _, text = parsed(f"<html><body><p>Intro.</p><p>Energy is {formula} here.</p><p>The end.</p></body></html>")
    assert text.split("\n") == ["Intro.", f"Energy is {read} here.", "The end."]


def test_a_hidden_paragraph_is_not_shown_for_a_formula_in_it() -> None:
    page = f"<p>Intro.</p><p style='display: none'><math>{SIGNS}</math> is hidden.</p><p>The end.</p>"
    assert parsed(f"<html><body>{page}</body></html>")[1] == "Intro.\nThe end."


def test_what_follows_a_formula_that_is_never_closed_is_read() -> None:
    page = f"<p>Intro.</p><math alttext=a><p>Energy.</p><p><math alttext='E=m'>{SIGNS}</math></p>"
    assert parsed(f"<html><body>{page}</body></html>")[1] == "Intro.\nEnergy.\n\\(E=m\\)"


def test_headings_are_found_again_in_the_text_whatever_is_hidden_in_them() -> None:
    shown = f"<span><math>{SIGNS}{TEX}</math></span><span aria-hidden=true>E<b>m</b></span>"
    page = f"<h2>The law {shown}</h2><p>Intro.</p><h2>Its use<a aria-hidden=true href=#use>#</a></h2><p>The end.</p>"
    tree, text = parsed(f"<html><body>{page}</body></html>")
    lines = text.split("\n")
    assert [name for _, name in headings(tree)] == [lines[0], lines[2]] == [r"The law \(E=m\)", "Its use"]


class Counting(html.HtmlElement):
    """Counts the elements that are looked at, by what is asked of it. What is asked in brackets is near by."""

    looked_at = 0

    def xpath(self, path: str, **options: Any) -> Any:
        outside, n = path, 1
        while n:
            outside, n = re.subn(r"\[[^\[\]]*\]", "", outside)
        for step in outside.split("|"):  # each of two steps down begins anew from all that the first has found
            place = self.getroottree().getroot() if ".." in step else self
            Counting.looked_at += place.n_below() ** max(1, len(re.findall("//|descendant", step)))
        return super().xpath(path, **options)

    def iter(self, *tags: Any) -> Any:
        Counting.looked_at += self.n_below()
        return super().iter(*tags)

    def iterdescendants(self, *tags: Any) -> Any:
        Counting.looked_at += self.n_below()
        return super().iterdescendants(*tags)

    def n_below(self) -> int:
        """And itself."""
        return sum(1 for _ in super().iter())


def looked_at(read: Callable[[Any], object], part: str, n: int) -> int:
    """Elements, to read a page that holds a part so often."""
    parser = html.HTMLParser()
    parser.set_element_class_lookup(etree.ElementDefaultClassLookup(element=Counting))
    page = html.fromstring(f"<body><article>{n * part}</article></body>", parser=parser)
    Counting.looked_at = 0
    read(page)
    return Counting.looked_at


def test_a_page_of_many_formulas_takes_no_longer_than_its_length() -> None:
    part = f"<p>a <math>{SIGNS}</math> b <m:math>{PREFIXED}</m:math></p>"
    once = looked_at(spell_formulas, part, 50)
    assert 50 * 10 < once < looked_at(spell_formulas, part, 100) <= 2 * once


CODE = ["<div class=highlight><pre>{}</pre></div>", "<pre><code>{}</code></pre>", "<pre>{}</pre>"]


@pytest.mark.parametrize("before", ["", f"<p>{LINE}</p>" * 6])
@pytest.mark.parametrize(
    "written",
    [
        *(
            f"<p>w1 <span>a <{tag}></{tag}> w2</span> b w3</p>"
            for tag in (
                *(
                    "svg",
                    "math",
                    "button",
                    "nobr",
                    "acronym",
                    "picture",
                    "iframe",
                    "object",
                    "select",
                    "video",
                    "label",
                ),
                *("o:p", "my-tag", "input", "hr", "canvas"),
            )
        ),
        *(f"<div>w1 <{tag}>w2</{tag}> w3</div>" for tag in ("my-tag", "o:p", "label", "time", "q", "code")),
        "<h3><button>w1</button></h3><dl><dt><button>w2</button><dd>a</dl><summary><button>w3</button></summary>",
        "<h3><button>w1</button><svg><title>Open</title></svg></h3><h3><button>w2</button><select><option>a</select></h3>w3",
        "<div><h4><a href=#a>w1</a></h4></div><div id=a>Yes.</div><div><a tabindex=0>w2</a></div><div>No.</div>w3",
        "<div><h4><div><a href=#a>w1</a></div></h4></div>Yes.<div><h4><a href='javascript:void(0)'>w2</a></h4></div>No."
        "<div class=card-header><a class=card-link data-toggle=collapse href=#c>w3</a></div>No.",
        "<h3>w1 <my-icon></my-icon>w2</h3><p>w3</p>",
        "<my-app>w1 <p>w2</p> w3</my-app>",
        "<p>w1 <span>a <div>w2</div></span> w3</p>",
        "<p>w1 <a href=a>b <div>w2</div></a> w3</p>",
        "<p>w1 <code>a<br>w2</code> w3</p>",
        "<div><p>w1</p><p>a <a href=a>w2</a></p><p>w3</p></div>",
        "<figure><figcaption>w1<div>w2</div>w3</figcaption></figure>",
        "<details><summary>w1 <p>w2</p> w3</summary></details>",
        "<fieldset><legend>w1</legend><p>w2</p></fieldset><label>w3</label>",
        "<hgroup>w1 <h2>w2</h2></hgroup><menu><li>w3</menu>",
        "<table><caption>w1</caption><tr><td><ul><li>w2</ul></table>w3",
        "<ul><li>a<table><caption>w1</caption><tr><td>w2</table></ul>w3",
        "<table><tr><td><center>w1</center> a <b>w2</b> b <select></select> c <i>d</i> e <div>w3</div></table>",
        "<blockquote>w1 <blockquote>w2</blockquote> w3</blockquote>",
        "<li>w1</li><li>w2 </li>w3",
        *(f"{made.format('w1')}{made.format('w2')}{made.format('<i>w3</i>')}" for made in CODE),
        "<div><h2>w1</h2><a href=#a><svg></svg></a></div><p>w2</p><div><a id=a></a><p>w3</p></div>",
        "<figure><a href=a><img src=a.png></a><figcaption>w1</figcaption></figure><p>w2</p><p>w3</p>",
        "<div><h2>w1</h2><p>9 to 5</p><p><a href=a>Show on map</a></p></div><p>w2</p><p>w3</p>",
        "<div>"
        + "<div><h3>w</h3><p>Do it.</p><p><a href=a>See</a></p></div>" * 3
        + "</div><p>w1</p><p>w2</p><p>w3</p>",
        "<div style='overflow: hidden'>w1</div><figure style=overflow-x:hidden;color:red>w2</figure><p>w3</p>",
        "<p class=wp-caption-text id=a>w1<p id=caption-attachment-1>w2<p id=caption>w3",
        "<figure><figcaption><p><span class=caption-text>w1</span></p></figcaption></figure><p class=wp-caption-text>w2"
        "<table><caption><span class=caption-text>w3</span></caption><tr><td>a</table>",
        "<table><tr><td><div><a href=a>w1</a></div><td>One<td><ul><li><a href=b>w2</a></ul><tr><th>Two<td>w3</table>",
        "<p>w1<aside class='footnote-list'><aside class=footnote role=doc-footnote>w2 <p>w3</p></aside></aside>",
        "<p>w1<aside role=doc-footnote><p>w2</p></aside><aside role=doc-endnotes><ol><li>w3</ol></aside>",
        "<p>w1<aside role=doc-tip><p>w2</p></aside><aside role=note><p>w3</p></aside>",
        "<div><a href=''>w1</a></div>Yes.<ul><li><a name=x>w2 is an entry</a></li><li><a name=y>w3</a></li></ul>",
        "<p>w1<aside class='starlight-aside starlight-aside--tip'>w2</aside><aside class='quote no-group'>w3</aside>",
        *(f"<{tag}><li>w1</li><li><a href=a>w2</a></li><li><a href=b>w3</a></li></{tag}>" for tag in ("ol", "ul")),
        "<dl><dt>w1<dd><figure><a href=a><img src=a.png></a><figcaption>w2</figcaption></figure>w3</dl>",
        "<div><dl><dt>w1<dd><p><a href=a><img src=a.png></a></p>w2</dl></div>w3",
        "<table><tr><th>Country<th>Area"
        + f"<tr><td><a href=a>{LINE}</a><td><a href=b>Europe</a>" * 20
        + "<tr><td>w1<td>w2"
        "</table>w3",
        "<table><tr><td>Country<td>Area" + f"<tr><td><a href=a>{LINE}</a><td>{LINE[:30]}" * 20 + "<tr><td>w1<td>w2"
        "</table>w3",
        "<table><tr><th>w1<td><a href=a>a</a><tr><th>w2<td><div><ul><li>b<li>c</ul></div></table><p>w3</p>",
        "<address>w1 <b>a</b><p>w2</p>w3</address>",
        "<div><header>w1 <b>a</b></header><search>w2 <p>a</p></search></div>w3",
        "<div><dt>w1</dt> <dd>w2 <b>a</b></dd> w3</div>",
        "<p>w1 <a href=a>a <div>w2</div> w3</a></p>",
        "<h3>w1 <button>w4</button></h3><p><button>w4</button></p>w2 w3",
        "<pre>w1&#12;</pre><h2>Print&#xB</h2><p>w2\fw3</p>",
        "<div style='overflow:hidden;color:red'>w1</div><p style='overflow:hidden;display:none'>w4</p>w2 w3",
    ],
)
def test_words_are_read_in_their_order_whatever_stands_among_them(before: str, written: str) -> None:
    assert words_of(f"<html><body><p>Intro.</p>{before}{written}<p>The end.</p></body></html>") == [1, 2, 3]


@pytest.mark.parametrize(
    "left_out",
    [
        *(
            f"<{tag}>no</{tag}>"
            for tag in ("aside", "button", "dialog", "noscript", "object", "svg", "form", "template")
        ),
        "<select><option>no</select><textarea>no</textarea>",
        "<canvas>no</canvas><video>no</video><iframe>no</iframe>",
        "<audio>no</audio><datalist><option>no</datalist><map>no</map><script>no</script><style>no</style>",
        "<footer>no</footer>",
        *(f"<{tag} role=navigation>no</{tag}>" for tag in ("aside", "dialog", "form", "nav")),
        *(f"<aside role=doc-{role}>no</aside>" for role in ("pullquote", "toc")),
        "<ruby><rp>no</rp><rt>no</rt></ruby>",
        *(
            f"<{tag} {hidden}><p>no</p></{tag}>"
            for tag in ("label", "my-tag", "blockquote", "fieldset", "figure")
            for hidden in ("style=display:none", "aria-hidden=true")
        ),
        "<fieldset class=newsletter>no</fieldset>",
        "<div class=sidebar>no</div>",
    ],
)
def test_what_the_pages_of_documentation_say_is_left_out_is(left_out: str) -> None:
    assert parsed(f"<html><body><p>w1</p><div>w2 {left_out} w3</div></body></html>")[1].split() == ["w1", "w2", "w3"]


@pytest.mark.parametrize(
    "links",
    [
        "<ul><li><a href=#a>{}</a></li><li><a href=#b>{}</a></li></ul><div><h4><a href=c>{}</a></h4></div>",
        "<ul><li><a>{}</a><ul><li><a href=a>{}</a></ul><li><h3><a href=#a>{}</a></h3></ul>",
        f"<div><p>no</p>{'<p><a href=a>{}</a></p>' * 2}</div>",
        f"<ul><li>no</li>{'<li><a href=a>{}</a></li>' * 8}</ul>",
        f"<table><tr><td>no{'<tr><td><a href=a>{}</a>' * 8}</table>",
    ],
)
def test_links_with_little_beside_them_are_left_out(links: str) -> None:
    text = parsed(f"<html><body><p>{LINE}</p>{links.replace('{}', LINE[:40])}<p>The end.</p></body></html>")[1]
    assert text.split("\n") == [LINE, "The end."]


@pytest.mark.parametrize("mark", ["class=post", "itemprop=articleBody"])
def test_a_page_of_a_blog_is_its_article_however_short(mark: str) -> None:
    menu = "<ul class=menu><li><a href=/>Home</a></li><li><a href=/about>About us</a></li></ul>"
    side = "<div id=sidebar><h3>Recent posts</h3><ul><li><a href=/1>Wasps sting</a></li></ul></div>"
    post = "<h1>Bees</h1><div class=entry-content><p>They sleep in winter.</p><ul><li>They dance.</li></ul></div>"
    _, text = parsed(
        f"<body><div id=header>{menu}</div><div {mark}>{post}</div><div>Seen today</div>{side}<div id=footer>1999</div>"
    )
    assert text.split("\n") == ["Bees", "They sleep in winter.", "- They dance."]


@pytest.mark.parametrize(
    "page",
    [
        *(
            f"<div class='{layout}'>no</div><div class='{layout}' {mark}>{{}}</div><div class='{layout}'>no</div>"
            for layout in ("container", "")
            for mark in ("itemprop=articleBody", "role=article", "id=content")
        ),
        "<ul><li><span class=text>no</span></ul><div class=text>{}</div>",
    ],
)
def test_what_only_looks_like_the_article_of_a_page_is_not_read(page: str) -> None:
    assert parsed(f"<html><body>{page.format(f'<p>{LINE}</p>')}</body></html>")[1] == LINE


@pytest.mark.parametrize(
    "around",
    [
        "<main><p>no</p><article>{}</article><div><h3>no</h3><p>no</p></div></main>",
        "<main><p>no</p><article>{}</article><form>no</form></main>",
        "<header><p>no</p></header><article>{}</article><section><article>no</article><article>no</article></section>",
        "<main><article>{}</article></main><article>no</article>",
        "<main><article id=sidebar>{}</article>no</main>",
    ],
)
def test_a_page_is_its_innermost_article_that_has_more_than_half_of_it(around: str) -> None:
    article = "".join(f"<p>{LINE} w{number}</p>" for number in range(6)) + f"<article>{LINE * 9} w6</article>"
    page = f"<html><body>{around.format(article)}</body></html>"
    assert words_of(page) == list(range(7))
    assert "no" not in parsed(page)[1].split()


@pytest.mark.parametrize("frame", ["<footer>{}</footer>", "<div role=navigation>{}</div>", "<script>{}</script>"])
def test_what_frames_a_page_is_no_part_of_which_the_article_has_the_most(frame: str) -> None:
    page = f"<p>no</p><article><h1>w0</h1><p>{LINE} w1</p></article>{frame.format(LINE * 9)}"
    assert parsed(f"<html><body>{page}</body></html>")[1] == f"w0\n{LINE} w1"


@pytest.mark.parametrize(
    "page",
    [
        "w0<div>{line}</div>w1",
        "<div>w0 {line}</div><article>w1</article>",  # the article is less than half
        "<p>no</p><article><h1>w0</h1><article>{line} w1</article></article>",
        "<p>no</p><article><h1>w0</h1><main>{line} w1</main></article>",
        "<h1>w0</h1><form>{line}</form><form><p>w1</p>{line}</form>",  # only together they hold most
    ],
)
def test_a_page_is_read_from_its_beginning(page: str) -> None:
    words = parsed(f"<html><body>{page.replace('{line}', LINE)}</body></html>")[1].split()
    assert (words[0], "w1" in words, "no" in words) == ("w0", True, False)


def test_a_form_that_is_less_than_half_of_a_page_is_left_out() -> None:
    assert parsed(f"<html><body><p>{LINE}</p><form><p>{LINE[:50]}</p></form></body></html>")[1] == LINE


def test_code_and_tables_within_a_table_keep_their_lines() -> None:
    for within in ("<pre>w1\n  w2</pre>", "<table><tr><td>w1<tr><td>w2</table>", "<dl><dt>w1<dd>w2</dl>"):
        text = parsed(f"<html><body><table><tr><td>a<td>{within}<tr><td>b<td>c</table></body></html>")[1]
        assert "w1" in text.split("w2")[0].split("\n")[-2], text


@pytest.mark.parametrize(
    ("around", "post"),
    [
        ("<main><h1>w0</h1><div>{}</div></main>", "<div><article>{}</article></div>"),
        ("<div><h2>w0</h2>{}</div>", "<div><h3>Re:</h3><div class=content>{}</div></div>"),  # phpBB
        ("<p>w0</p>{}", '<section><div class="wpb_text_column">{}</div></section>'),
        ("<p>w0</p>{}", "<div><div class=post>{}</div></div>"),
        ("<p>w0</p>{}", "<div><form>{}</form></div>"),
        ("<p>w0</p>{}", '<div><div class="text-content text-{number}">{}</div></div>'),
    ],
)
@pytest.mark.parametrize("large", range(4))
def test_posts_of_a_thread_are_read_all_however_large_one_is(around: str, post: str, large: int) -> None:
    texts = (f"<p>{LINE * (9 if number == large else 1)} w{number + 1}</p>" for number in range(4))
    posts = "".join(post.format(text, number=number) for number, text in enumerate(texts))
    assert words_of(f"<html><body>{around.format(posts)}</body></html>") == list(range(5))


@pytest.mark.parametrize("large", range(3))
@pytest.mark.parametrize(
    "page",
    [
        "<div class=post>{}</div><div class=post>{}<div class=post>{}</div></div>",
        "<div class=a><div class=post-body>{}</div></div><ul>" + "<li><div class=post-body>{}</div></li>" * 2 + "</ul>",
    ],
)
def test_posts_of_a_thread_are_read_all_wherever_they_stand(page: str, large: int) -> None:
    posts = [f"<p>{LINE * (9 if number == large else 1)} w{number}</p>" for number in range(3)]
    assert words_of(f"<html><body>{page.format(*posts)}</body></html>") == list(range(3))


def test_what_stands_beside_the_one_article_of_a_page_is_read_unless_it_is_little() -> None:
    table = "<section><table><tr><th>w2<td>12 kg</table></section>"
    questions = f"<section><details><summary>w3</summary><p>{LINE} w4</p></details></section>"
    article = f"<article><h1>w0</h1><p>{LINE * 2} w1</p></article>"
    assert words_of(f"<html><body><main>{article}{table}{questions}</main></body></html>") == list(range(5))


def test_names_that_pages_have_on_buttons_are_words_in_cells_items_and_headings() -> None:
    table = "<table><tr><th>Mail<th>Share<tr><td> Google <td>12<tr><td><b>Facebook</b><br>Mail<td>8</table>"
    items = "<ul><li>PDF</li><li>Mail <i>x</i></li></ul><dl><dt>E-Mail<dd>read</dl>"
    page = f"<h2><i></i>Print</h2><p>It is old.</p>{items}{table}<p>The end.</p><p>Print</p>"
    text = parsed(f"<html><body>{page}</body></html>")[1]
    assert re.sub(r"[-|\s]+", " ", text) == (
        "Print It is old. PDF Mail x E Mail read Mail Share Google 12 Facebook Mail 8 The end."
    )


def test_a_page_that_the_parser_would_cut_off_is_a_failure() -> None:
    with pytest.raises(Failed, match="255"):
        parsed(f"<html><body>{'<div>word' * 254}<p>The end.</p></body></html>")
    assert "The end." in parsed(f"<html><body>{'<div>word' * 250}<p>The end.</p></body></html>")[1]


def test_a_page_of_many_small_tables_takes_no_longer_than_its_length() -> None:
    part = "<table><tr><th>a<td>b<tr><td>c<td>d</table>"
    once = looked_at(_rename_kinds, part, 50)
    assert 50 * 10 < once < looked_at(_rename_kinds, part, 100) <= 2 * once
