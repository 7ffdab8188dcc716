"""The commands `openbook passages get`, `around` and `find`: passages in their documents."""

import sys
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unicodedata import normalize

import typer

from openbook.core.address import EXPECTED, is_address
from openbook.errors import InvalidRequest
from openbook.reaching import Ca, Cert, Key, Tls, client

if TYPE_CHECKING:
    from openbook.core.types import Passage
    from openbook.index.disk.passages import SnapshotPassages
    from openbook.rag.answer import Excerpt

passages_app = typer.Typer(no_args_is_help=True, help="Look passages up in their documents.", rich_markup_mode=None)

Where = Annotated[str, typer.Argument(help="A snapshot, a root of snapshots, or host:port of a gRPC endpoint.")]
Id = Annotated[str, typer.Argument(help="A lasting id, or the number that an answer gives.")]
Json = Annotated[bool, typer.Option("--json", help="A line of JSON a passage.")]


@passages_app.command()
def get(
    context: typer.Context,
    where: Where,
    id: Id,
    tls: Tls = False,
    tls_ca: Ca = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
    json: Json = False,
) -> None:
    """Show one passage and where it comes from.

    Where a key is needed, it is taken from OPENBOOK_API_KEY.
    """
    from openbook.terminal import print_passages

    print_passages([_excerpt(where, id, 0, context.params).passage], json)


@passages_app.command()
def around(
    context: typer.Context,
    where: Where,
    id: Id,
    n: Annotated[int, typer.Option("-n", help="So many before it, and behind.")] = 2,
    tls: Tls = False,
    tls_ca: Ca = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
    json: Json = False,
) -> None:
    """Show a passage and those beside it in its document.

    Where a key is needed, it is taken from OPENBOOK_API_KEY.
    """
    from openbook.terminal import print_passages

    found = _excerpt(where, id, n, context.params)
    print_passages([*found.before, found.passage, *found.after], json, found.passage.id)


@passages_app.command()
def find(
    snapshot: Annotated[Path, typer.Argument(help="A snapshot, or a root of snapshots: all passages are read.")],
    document: Annotated[str | None, typer.Option(help="Its document's id is this one.")] = None,
    title: Annotated[str | None, typer.Option(help="Its title contains this, in capitals or not.")] = None,
    path: Annotated[str | None, typer.Option(help="Its path or address contains this.")] = None,
    text: Annotated[str | None, typer.Option(help="It contains this, in capitals or not.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most so many.")] = 10,
    json: Json = False,
) -> None:
    """Find passages by what they are and contain: all that is given must hold. Questions are for `openbook ask`."""
    from openbook.index.disk.passages import SnapshotPassages
    from openbook.terminal import print_passages

    wanted = {"title": title, "path": path, "text": text}
    if document is None and not any(wanted.values()):
        raise InvalidRequest("one of --document, --title, --path, --text must be given, got none")
    if not snapshot.is_dir():
        raise InvalidRequest(f"{snapshot}: no such folder; find reads a snapshot's folder, and asks no endpoint")
    passages = SnapshotPassages(snapshot)
    fits = (each for each in passages if document in (None, each.document_id) and _fits(each, wanted))
    found = islice(fits, limit)
    first = list(islice(found, 1))
    if not first:
        print(f"{snapshot}: no passage found", file=sys.stderr)
    print_passages(chain(first, found), json)  # each as it is found


def _fits(passage: "Passage", wanted: dict[str, str | None]) -> bool:
    origin = passage.origin
    places = f"{origin.path}\n{origin.url}" if origin else ""
    having = {"title": passage.title, "path": places, "text": passage.text}
    return all(_plain(part) in _plain(having[name]) for name, part in wanted.items() if part)


def _plain(text: str) -> str:
    """Without what may differ. Names of files may have accents as signs of their own, as macOS writes them."""
    return normalize("NFC", text).casefold()


def _excerpt(where: str, id: str, n: int, given: Mapping[str, Any]) -> "Excerpt":
    if Path(where).is_dir():
        from openbook.index.disk.passages import SnapshotPassages

        return _excerpt_on_disk(SnapshotPassages(Path(where)), id, n)
    if not is_address(where):
        raise InvalidRequest(f"{where}: no such folder, and an endpoint {EXPECTED}")
    with client(where, given) as endpoint:
        return endpoint.passage(id, n)


def _excerpt_on_disk(passages: "SnapshotPassages", id: str, n: int) -> "Excerpt":
    from openbook.core.passages import ids_around, in_document
    from openbook.rag.answer import Excerpt

    position = passages.locate(id)
    ids = ids_around(position, n, len(passages))
    before, after = in_document([passages[i] for i in ids], position - ids.start)
    return Excerpt(passages[position], tuple(before), tuple(after), passages.snapshot.manifest.snapshot_id, "")
