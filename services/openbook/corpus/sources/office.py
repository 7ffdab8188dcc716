"""DOCX and EPUB: archives of XML, a document each. Macros, links and whatever else is in them is not looked at."""

import posixpath
import zipfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from openbook.core.passages import Document
from openbook.corpus.sources import web
from openbook.corpus.sources.limits import Failed, counted
from openbook.corpus.sources.opened import Opened

WORD = "word/document.xml"
PROPERTIES = "docProps/core.xml"
CONTAINER = "META-INF/container.xml"


def is_docx(names: set[str]) -> bool:
    """Whether an archive with these members is one."""
    return {"[Content_Types].xml", WORD} <= names


def is_epub(names: set[str]) -> bool:
    """Whether an archive with these members is one."""
    return {"mimetype", CONTAINER} <= names


def read_docx(opened: Opened, archive: zipfile.ZipFile) -> Iterator[Document]:
    """Paragraphs, and tables a row a line. What was deleted under "track changes" is left out."""
    body = _xml(opened, archive, WORD)
    for fallback in list(body.iter("{*}Fallback")):  # says again what stands beside it
        fallback.getparent().remove(fallback)
    text = "".join(_words(body))
    title = _title(_xml(opened, archive, PROPERTIES)) if PROPERTIES in archive.namelist() else ""
    yield opened.document(opened.path, title or opened.stem, text)


def _words(body: Any) -> Iterator[str]:
    from lxml import etree

    ends = {"p": "\n", "tc": "| ", "tab": "\t", "br": "\n", "cr": "\n"}
    for element in body.iter("{*}t", "{*}p", "{*}tab", "{*}br", "{*}cr", "{*}tc"):
        yield element.text or "" if (name := etree.QName(element).localname) == "t" else ends[name]


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
    for each in package.iter("{*}itemref"):
        if not (place := places.get(each.get("idref"))):
            raise Failed(f"its spine names {each.get('idref')!r}, which is not there")
        name = posixpath.normpath(posixpath.join(folder, unquote(place)))
        chapters.append(web.text_of(_xml(opened, archive, name)))
    if not any(chapters):
        raise Failed("no text found")
    yield opened.document(opened.path, _title(package) or opened.stem, "\n".join(chapters))


def _title(tree: Any) -> str:
    from lxml import etree

    titles = tree.iter("{http://purl.org/dc/elements/1.1/}title")
    return next((" ".join("".join(each.itertext(etree.Element)).split()) for each in titles), "")


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
