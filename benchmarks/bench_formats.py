"""The same documents in every format: the same passages, whose spans are their texts? And how fast each is read.

    python benchmarks/bench_formats.py CORPUS... [--documents 0] [--only NAME...]

Documents as JSON lines are written as CSV, Parquet, WikiExtractor's JSON, a MediaWiki dump, and folders of one Markdown
or HTML file each, with what is special there escaped; each is read and split as `openbook build` does, by a process for
each core. Columns:

- passages: how many; other: of these, title or text are not those of the passage at the same place of the JSON lines
- spans: of these, the characters that their origin names in the text of their document are their text
- failures: what could not be read
- a second: passages read

Prints a table, some passages that are others, and one JSON line; ends with 1 if there are any, or spans are wrong.
"""

import argparse
import csv
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import track
from rich.table import Table

from openbook.core.passages import joined, split
from openbook.corpus.read import lines, read_documents
from openbook.corpus.sources.limits import Failure, Limits
from openbook.processes import threads

Documents = Sequence[tuple[str, str]]
"""Titles and texts."""
FILES_TOGETHER = 1000
N_SHOWN = 5


def records(documents: Documents) -> Iterator[dict[str, str]]:
    """As JSON lines have them."""
    for i, (title, text) in enumerate(documents):
        yield {"id": str(i), "title": title, "text": text}


def as_json_lines(documents: Documents, path: Path) -> None:
    """The format that others are held to."""
    with path.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records(documents))


def as_wikiextractor(documents: Documents, path: Path) -> None:
    """With its revision and address."""
    with path.open("w") as file:
        for record in records(documents):
            file.write(json.dumps({**record, "revid": "1", "url": f"https://w?curid={record['id']}"}) + "\n")


def as_csv(documents: Documents, path: Path) -> None:
    """With a line of names."""
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, ["id", "title", "text"])
        rows.writeheader()
        rows.writerows(records(documents))


def as_parquet(documents: Documents, path: Path) -> None:
    """In groups of rows as pyarrow makes them."""
    pq.write_table(pa.Table.from_pylist(list(records(documents))), path)


def as_mediawiki(documents: Documents, path: Path) -> None:
    """A dump, in which nothing of a text is markup."""
    with path.open("w") as file:
        file.write('<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">')
        for i, (title, text) in enumerate(documents):
            marked = re.sub(r"[^\w\s]", lambda found: f"&#{ord(found[0])};", text).replace("_", "&#95;")
            body = escape(marked.replace("\n", "\n\n"))
            file.write(
                f"<page><title>{escape(title)}</title><ns>0</ns><id>{i}</id><revision><id>1</id>"
                f'<text xml:space="preserve">{body}</text></revision></page>\n'
            )
        file.write("</mediawiki>")


def as_files(documents: Documents, folder: Path, ending: str, page: Callable[[str, str], str]) -> None:
    """A file each, whose names are in their order."""
    for i, each in enumerate(documents):
        path = folder / f"{i // FILES_TOGETHER:04d}" / f"{i:07d}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(*each))


def markdown(title: str, text: str) -> str:
    """A heading and paragraphs."""
    return "\n\n".join([f"# {escaped(title)}", *map(escaped, text.split("\n"))])


def escaped(text: str) -> str:
    """Nothing of it is Markdown."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", text)


def html(title: str, text: str) -> str:
    """A page with something around its article."""
    paragraphs = "".join(f"<p>{escape(line)}</p>\n" for line in text.split("\n"))
    return (
        f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>{escape(title)}</title></head><body><nav>'
        f'<a href="/">Home</a></nav><article>{paragraphs}</article><footer><a href="/c">Cookies</a></footer></body>'
        "</html>"
    )


FORMATS: dict[str, Callable[[Documents, Path], None]] = {
    "JSON lines": as_json_lines,
    "CSV": as_csv,
    "Parquet": as_parquet,
    "WikiExtractor": as_wikiextractor,
    "MediaWiki": as_mediawiki,
    "Markdown": lambda documents, path: as_files(documents, path, ".md", markdown),
    "HTML": lambda documents, path: as_files(documents, path, ".html", html),
}


class Read:
    """What was found in one format."""

    def __init__(self, path: Path) -> None:
        self.failures: list[Failure] = []
        self.passages: list[tuple[str, str]] = []
        self.n_spans = 0
        begun = time.perf_counter()
        for document in read_documents(path, self.failures.append, Limits(), threads(0)):
            whole = joined(document)
            for text, origin in split(document):
                self.passages.append((document.title, text))
                self.n_spans += whole[origin.start : origin.end] == text
        self.seconds = time.perf_counter() - begun

    def others(self, wanted: "Read") -> list[tuple[str, str]]:
        """Passages that are not those wanted; where some are missing, those that are nowhere among them."""
        if len(self.passages) == len(wanted.passages):
            return [each for each, other in zip(self.passages, wanted.passages, strict=True) if each != other]
        among = set(wanted.passages)
        return [each for each in self.passages if each not in among]


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="+")
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(FORMATS))
    args = parser.parse_args()
    rows = (json.loads(line) for path in args.corpus for _, line in lines(path))
    documents = [(row["title"], row["text"]) for row in rows][: args.documents or None]
    table = Table(f"{len(documents)} documents", "passages", "other", "spans", "failures", "a second")
    found: dict[str, Read] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in track(dict.fromkeys(["JSON lines", *args.only]), console=Console(stderr=True)):
            path = Path(folder) / name.replace(" ", "-")
            FORMATS[name](documents, path)
            found[name] = Read(path)
    wanted, results = found["JSON lines"], {}
    for name, each in found.items():
        others = each.others(wanted)
        results[name] = {
            "passages": len(each.passages),
            "other": len(others),
            "spans": each.n_spans,
            "failures": len(each.failures),
            "a second": round(len(each.passages) / each.seconds),
        }
        table.add_row(name, *(f"{value:,}" for value in results[name].values()))
        for shown in [*others[:N_SHOWN], *each.failures[:N_SHOWN]]:
            print(name, ascii(shown)[:300], file=sys.stderr)
    Console().print(table)
    print(json.dumps({"benchmark": "formats", "documents": len(documents), "formats": results}))
    is_same = all(each.passages == wanted.passages for each in found.values())
    sys.exit(not is_same or any(each.n_spans != len(each.passages) for each in found.values()))


if __name__ == "__main__":
    main()
