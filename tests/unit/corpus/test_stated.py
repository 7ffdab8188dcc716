"""What documents state of themselves, in every format: sections, pages, address, language, date, the user's fields."""

import datetime
import io
import json
from pathlib import Path

import every_format as formats
import pytest
from every_format import DOCUMENTS, EACH, TOGETHER

from openbook.core.documents import Document
from openbook.core.origin import Field, Origin
from openbook.core.passages import joined, split
from openbook.core.splitting import Splitting
from openbook.corpus.read import read_passages
from openbook.corpus.sources import stated
from openbook.corpus.sources.limits import Budget, Failure, Limits
from openbook.corpus.sources.opened import Opened
from openbook.corpus.sources.parse import Parse

FIELDS = tuple(map(Field.parse, ("year:int", "open:bool", "author")))


def parse(content: bytes, name: str, fields: tuple[Field, ...] = FIELDS) -> list[Document | Failure]:
    """Here, without a process."""
    limits = Limits()
    file = io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]
    opened = Opened(name, file, limits, Budget(limits, len(content)), fields=fields)
    return [event for event in Parse().events(opened) if isinstance(event, Document | Failure)]


def only(content: bytes, name: str) -> Document:
    (found,) = parse(content, name)
    assert isinstance(found, Document), found
    return found


def origins(document: Document, n_words: int = 4) -> list[Origin]:
    return [origin for _, origin in split(document, Splitting(n_words))]


def parts(name: str) -> list[bytes]:
    if name in TOGETHER:
        return [TOGETHER[name](DOCUMENTS)]
    return [EACH[name](title, text) for title, text in DOCUMENTS[:2]]


@pytest.mark.parametrize("name", sorted({*TOGETHER, *EACH} - {"all.parquet.gz"}))  # which needs a process of its own
def test_every_span_of_every_format_is_its_text(name: str) -> None:
    documents = [each for content in parts(name) for each in parse(content, f"a{name}")]
    assert documents
    for document in documents:
        assert isinstance(document, Document)
        whole = joined(document)
        pieces = list(split(document, Splitting(20)))
        assert len(pieces) > 1
        assert [whole[origin.start : origin.end] for _, origin in pieces] == [text for text, _ in pieces]


# --- sections


def docx(styles: str, heading: str) -> bytes:
    def paragraph(text: str, level: int) -> str:
        style = f'<w:pPr><w:pStyle w:val="{heading}{level}"/></w:pPr>' if level else ""
        return f"<w:p>{style}<w:r><w:t>{text}</w:t></w:r></w:p>"

    paragraphs = "".join(paragraph(*each) for each in [("Life", 1), ("one two three", 0), ("Early", 2)])
    paragraphs += "".join(paragraph(*each) for each in [("one two three", 0), ("Work", 1), ("one two three", 0)])
    core = (
        '<c:p xmlns:c="c" xmlns:d="http://purl.org/dc/elements/1.1/" xmlns:t="http://purl.org/dc/terms/"><d:title>Bell'
        "</d:title><d:language>de-CH</d:language><t:created>1998-05-17T08:30:00Z</t:created></c:p>"
    )
    return formats.zipped(
        {
            "[Content_Types].xml": b"<Types/>",
            "docProps/core.xml": core.encode(),
            "word/styles.xml": f'<w:styles xmlns:w="w">{styles}</w:styles>'.encode(),
            "word/document.xml": f'<w:document xmlns:w="w"><w:body>{paragraphs}</w:body></w:document>'.encode(),
        }
    )


LOCAL_STYLES = "".join(f'<w:style w:styleId="berschrift{i}"><w:name w:val="heading {i}"/></w:style>' for i in (1, 2))
HTML = (
    b'<html lang="de_CH"><head><title>Bell</title><link rel="canonical" href="https://example.org/bell">'
    b'<meta property="article:published_time" content="1998-05-17"><meta name="Year" content="1998">'
    b"</head><body><h1>Bell</h1><h2>Life</h2><p>one two three</p><h3>Early</h3><p>one two three</p>"
    b"<h2>Work</h2><p>one two three</p></body></html>"
)
MARKDOWN = (
    b"---\ntitle: Bell\n1: x\n"
    b"date: 1998-05-17\nlang: de-CH\nurl: https://example.org/bell\nyear: 1998\nopen: yes\n---\n"
    b"## Life\n\none two three\n\n### Early\n\none two *three*\n\n## Work\n\none two three\n"
)
WIKITEXT = "'''Bell'''\n\n== ''Life'' ==\none two three\n\n===Early===\none two three\n\n== Work ==\none two three"
WIKI = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="de-CH"><siteinfo>'
    "<base>https://example.org/wiki/Main_Page</base></siteinfo><page><title>A Bell?</title><ns>0</ns><id>1</id>"
    f"<revision><timestamp>1998-05-17T08:30:00Z</timestamp><text>{WIKITEXT}</text></revision></page></mediawiki>"
).encode()
THREE = "one two three"
KILT = json.dumps(
    {
        "_id": "1",
        "wikipedia_title": "Bell",
        "text": ["Bell", "Section::::Life.", THREE, "Section::::Life.:Early.", THREE, "Section::::Work.", THREE],
        "history": {"url": "https://example.org/bell", "timestamp": "1998-05-17"},
    }
).encode()


@pytest.mark.parametrize(
    ("content", "name", "first"),
    [
        (MARKDOWN, "a.md", []),
        (HTML, "a.html", [""]),
        (docx("", "Heading"), "a.docx", []),
        (docx(LOCAL_STYLES, "berschrift"), "a.docx", []),
        (KILT, "a.json", []),
        (WIKI, "a.xml", [""]),
    ],
)
def test_a_passage_knows_the_headings_above_it(content: bytes, name: str, first: list[str]) -> None:
    document = only(content, name)
    words = document.text.split()
    found = {words[at]: origin.section for at, origin in enumerate(origins(document, 1)) if words[at][0].isupper()}
    life, early, work = (next(each for each in words if name in each) for name in ("Life", "Early", "Work"))
    assert (found[life], found[early], found[work]) == ("Life", "Life > Early", "Work")
    assert [origin.section for origin in origins(document, 1)].count("Life > Early") >= 3
    if first:
        assert found["Bell"] == ""


def test_a_book_knows_its_headings() -> None:
    shown = "<body><h1>Life</h1><p>one two three</p><h2>Early</h2><p>one</p></body>"
    stated_there = "<dc:title>Bell</dc:title><dc:date>1998</dc:date><dc:language>fr</dc:language>"
    stated_there += (
        '<dc:source>https://example.org/bell</dc:source><t:created xmlns:t="http://purl.org/dc/terms/">7</t:created>'
    )
    package = (
        f'<package xmlns="o" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata>{stated_there}</metadata>'
        '<manifest><item id="c" href="x/../c.xhtml"/></manifest><spine><itemref idref="c"/></spine></package>'
    )
    book = formats.zipped(
        {
            "mimetype": b"application/epub+zip",
            "META-INF/container.xml": b'<a xmlns="c"><rootfiles><rootfile full-path="book.opf"/></rootfiles></a>',
            "book.opf": package.encode(),
            "c.xhtml": f'<html xmlns="http://www.w3.org/1999/xhtml">{shown}</html>'.encode(),
        }
    )
    document = only(book, "a.epub")
    assert [origin.section for origin in origins(document)] == ["Life", "Life > Early"]
    assert (document.language, document.date, document.url) == ("fr", "1998", "https://example.org/bell")
    again = formats.changed(book, "c.xhtml", b"<html><body><h1>Bell</h1></body></html>")
    assert only(again, "a.epub").sections == ((0, ""),), "a heading that is the title is none"
    empty = formats.changed(book, "c.xhtml", b"<html><body/></html>")
    assert parse(empty, "a.epub") == [Failure("a.epub", "no text found")]


def test_headings_are_of_any_level_and_that_which_is_the_title_or_empty_is_none() -> None:
    text = "---\ntitle: Bell\n---\n# Bell\n\none\n\n###### Six\n\ntwo"
    assert only(text.encode(), "a.md").sections == ((0, ""), (11, "Six"))
    heading = '<w:p><w:pPr><w:pStyle w:val="Heading{}"/></w:pPr><w:r><w:t>{}</w:t></w:r></w:p>'
    headings = "".join(heading.format(*each) for each in [(1, "Bell"), (9, "Nine"), (1, " ")])
    body = f'<w:document xmlns:w="w"><w:body>{headings}</w:body></w:document>'
    document = only(formats.changed(docx("", "Heading"), "word/document.xml", body.encode()), "a.docx")
    assert [name for _, name in document.sections] == ["", "Nine"]


def test_a_heading_that_is_not_in_the_text_is_passed_over() -> None:
    headings = [(1, "Menu"), (2, "Life"), (2, "Life"), (3, "")]
    assert stated.sections_of("intro\nLife\none\n Life \ntwo", headings) == ((6, "Life"), (15, "Life"))
    assert stated.sections_of("\nLife", [(1, ""), (2, "Life")]) == ((1, "Life"),)
    many = [(1, f"h{number}") for number in range(30)]
    assert stated.sections_of("h19", many) == ((0, "h19"),), "of a few that are missing before it"
    assert stated.sections_of("h20", many) == ()


def test_headings_are_cut_where_they_are_long() -> None:
    outline = stated.Outline()
    for level in range(1, 9):
        outline.add(level, level, "x" * 201)
    lengths = [len(name) for _, name in outline.sections]
    assert lengths == [200, 403, 606, 809, *[1000] * 4]
    assert stated.section("x" * 1000) == ((0, "x" * 1000),)


def test_the_first_page_is_one() -> None:
    from pypdf import PdfWriter

    writer = PdfWriter()
    for text in ("one two", "three four five", *"abcdefgh"):
        writer.append(io.BytesIO(formats.pdf("Bell", text)))
    writer.add_metadata({"/Title": "Bell", "/CreationDate": "D:19980517083000Z"})
    out = io.BytesIO()
    writer.write(out)
    document = only(out.getvalue(), "a.pdf")
    assert [origin.page for origin in origins(document, 1)] == [1, 1, 2, 2, 2, *range(3, 11)]
    assert document.date.startswith("1998-05-17T08:30")


# --- address, language, date, fields


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("id", {"id": "1", "_id": "2", "docid": "3", "document_id": "4"}),
        ("title", {"title": "A", "wikipedia_title": "B", "name": "C"}),
        ("text", {"text": "one", "contents": "two", "content": "three", "body": "four"}),
        ("url", {"url": "https://a.org", "link": "http://b.org/ü", "wikipedia_url": "https://c.org"}),
        ("language", {"language": "en", "lang": "zh-Hant-TW"}),
        ("date", {"date": "1998", "published": "1999", "timestamp": "2000"}),
    ],
)
def test_of_several_names_for_one_thing_the_first_that_is_there_counts(field: str, values: dict[str, str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for n_missing, name in enumerate(values):
        there = dict(list(values.items())[n_missing:][::-1])
        record = {**({} if field == "text" else {"text": "words"}), **there}
        table = io.BytesIO()
        pq.write_table(pa.table({name.title(): [value] for name, value in record.items()}), table)
        for content in (json.dumps(record | dict.fromkeys(values.keys() - there)).encode(), table.getvalue()):
            assert getattr(only(content, "a"), field) == values[name]


@pytest.mark.parametrize(
    ("head", "stated_there"),
    [
        (
            '<meta property="og:url" content="https://a.org"><meta name="DC.date" content="1998">',
            ("https://a.org", "", "1998"),
        ),
        ('<link rel="icon" href="https://a.org/a.png"><meta name="Language" content="pt_BR">', ("", "pt-BR", "")),
        (
            '<meta property="og:url" content="https://a.org"><link rel="canonical" href="https://b.org">'
            '<meta property="article:published_time" content="1999"><meta name="date" content="1998">',
            ("https://b.org", "", "1998"),
        ),
    ],
)
def test_the_head_of_a_page_states_its_address_language_and_date(head: str, stated_there: tuple[str, ...]) -> None:
    page = only(f"<html><head>{head}</head><body><p>some words</p></body></html>".encode(), "a.html")
    assert (page.url, page.language, page.date) == stated_there


@pytest.mark.parametrize(
    ("old", "new", "stated_there"),
    [
        (b"/Catalog", b"/Catalog/Lang(de_CH)", ("Bell", "de-CH", "")),
        (b"/Info 6 0 R", b"", ("a", "", "")),
        (b"<</Title", b"<</CreationDate(yesterday)/Title", ("Bell", "", "")),
        (b"(Bell)", b"(A\\n Bell)", ("A Bell", "", "")),
    ],
)
def test_a_pdf_states_what_can_be_read_of_it(old: bytes, new: bytes, stated_there: tuple[str, ...]) -> None:
    document = only(formats.pdf("Bell", "some words").replace(old, new), "a.pdf")
    assert (document.title, document.language, document.date) == stated_there


@pytest.mark.parametrize(
    ("content", "name", "url"),
    [
        (HTML, "a.html", "https://example.org/bell"),
        (MARKDOWN, "a.md", "https://example.org/bell"),
        (WIKI, "a.xml", "https://example.org/wiki/A_Bell%3F"),
        (docx("", "Heading"), "a.docx", ""),
    ],
)
def test_a_document_states_its_address_language_and_date(content: bytes, name: str, url: str) -> None:
    document = only(content, name)
    assert (document.url, document.language, document.date[:10]) == (url, "de-CH", "1998-05-17")


def test_what_is_none_is_left_out() -> None:
    document = only(
        b'{"text": "x", "url": "javascript:alert(1)", "language": ["en"], "date": "May", "metadata": "x"}', "a.jsonl"
    )
    assert (document.url, document.language, document.date) == ("", "", "")
    assert stated.url("https://example.org/a b") == stated.url(f"https://{'x' * 2041}") == ""
    assert stated.url(url := f"https://{'x' * 2040}") == url


RECORD = {"text": "some words", "year": 1998, "open": True, "author": "A. Bell", "date": "1876", "section": "Life"}


def parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    dated = {**RECORD, "date": datetime.date(1876, 3, 10)}
    pq.write_table(pa.table({name.title(): [value] for name, value in dated.items()}), out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (json.dumps(RECORD).encode(), "a.jsonl"),
        (json.dumps({"text": "some words", "metadata": RECORD}).encode(), "a.jsonl"),
        (json.dumps({**RECORD, "metadata": {"year": 7, "date": "7"}}).encode(), "a.jsonl"),  # its own are nearer
        ((",".join(RECORD) + "\n" + ",".join(map(str, RECORD.values()))).encode(), "a.csv"),
        (parquet(), "a.parquet"),
    ],
)
def test_declared_fields_come_from_columns_and_records(content: bytes, name: str) -> None:
    document = only(content, name)
    assert document.fields == {"year": 1998, "open": True, "author": "A. Bell"}
    assert document.date[:4] == "1876"
    if "metadata" not in content.decode(errors="ignore"):
        assert origins(document)[0].section == "Life"


def test_declared_fields_come_from_front_matter_and_the_head_of_a_page() -> None:
    assert only(MARKDOWN, "a.md").fields == {"year": 1998, "open": True}
    assert only(HTML, "a.html").fields == {"year": 1998}


def test_a_value_of_another_type_is_a_failure_and_the_next_row_is_read() -> None:
    rows = parse(b"text,year\nfirst,c. 1900\nsecond,1901\nthird,\n", "a.csv")
    assert rows[0] == Failure("a.csv:2", "year must be int, got 'c. 1900'")
    assert [each.fields for each in rows[1:] if isinstance(each, Document)] == [{"year": 1901}, {}]


def test_all_of_it_comes_with_the_passages(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(MARKDOWN)
    first, second, third = read_passages(tmp_path, splitting=Splitting(4), fields=FIELDS)
    assert second.origin == Origin(
        document_digest=first.origin.document_digest if first.origin else "",
        start=19,
        end=38,
        path="a.md",
        url="https://example.org/bell",
        section="Life > Early",
        language="de-CH",
        date="1998-05-17",
        fields={"year": 1998, "open": True},
    )
    assert third.origin is not None
    assert third.origin.section == "Work"


def test_a_record_of_kilt_states_what_is_in_its_history_and_may_be_empty() -> None:
    document = only(KILT, "a.json")
    assert (document.url, document.date) == ("https://example.org/bell", "1998-05-17")
    assert only(b'{"text": []}', "a.json").text == ""
    bullets = {"title": " Bell", "text": ["Bell\n", "BULLET::::- one\n", "BULLET::::two"]}
    assert only(json.dumps(bullets).encode(), "a.json").text == "one\ntwo"
    assert parse(b'{"text": [1]}', "a.json") == [Failure("a.json:1", "text must be a string or a list of strings")]


# --- Natural Questions

TOKENS = (
    "Bell - Wikipedia <H1> Bell </H1> Jump to : navigation , search <Table> <Tr> <Td> Born </Td> <Td> 1847 </Td> </Tr> "
    "</Table> <P> Bell was an engineer & a teacher . </P> <H2> Life ( edit ) </H2> <P> He was born in Edinburgh . </P> "
    "<Ul> <Li> one brother </Li> </Ul> <H3> Early ( edit ) </H3> <P> As a child he was curious . </P>"
)
EXAMPLE = {"example_id": 5655493461695504401, "document_url": "https://en.wikipedia.org//w/index.php?title=Bell"}


def test_natural_questions_pages_are_read_whole_and_as_tokens() -> None:
    page = HTML.decode().replace("one two three", "one two three four five six")
    original = {**EXAMPLE, "document_title": "A Bell", "document_html": page, "document_tokens": [], "annotations": []}
    simplified = {**EXAMPLE, "id": "own", "document_text": TOKENS, "question_text": "who was bell"}
    lines = "".join(json.dumps(each) + "\n" for each in (original, {"document_html": ""}, simplified))
    whole, failure, tokens = parse(lines.encode(), "nq-train.jsonl")
    assert isinstance(failure, Failure)
    assert failure.path == "nq-train.jsonl:2"
    assert isinstance(whole, Document)
    assert isinstance(tokens, Document)
    assert (whole.id, whole.title, whole.url) == ("5655493461695504401", "A Bell", EXAMPLE["document_url"])
    assert [name for _, name in whole.sections][-3:] == ["Bell > Life", "Bell > Life > Early", "Bell > Work"]
    assert (tokens.id, tokens.title, tokens.url) == ("own", "Bell", EXAMPLE["document_url"])
    assert [name for _, name in tokens.sections][-2:] == ["Life ( edit )", "Life ( edit ) > Early ( edit )"]
    for words in ("Born | 1847", "an engineer & a teacher .", "one brother", "he was curious ."):
        assert words in tokens.text
    assert "<" not in tokens.text
    titled = {"document_html": page.replace("<title>Bell", "<title>A Bell")}
    assert only(json.dumps(titled).encode(), "a.jsonl").title == "A Bell"
