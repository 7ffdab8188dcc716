"""What a build made of a corpus, as one page of HTML: nothing is loaded from anywhere."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openbook import files
from openbook.corpus.former import Changes
from openbook.corpus.sources.limits import Failure
from openbook.index.disk.passages import SnapshotPassages
from openbook.index.disk.snapshot import Manifest

N_SHOWN = 100
"""Of failures."""
N_REPEATED = 10
MOST_WORDS = 400
"""Passages that are longer are counted together."""
N_BARS = 40

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>openbook build</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 15px/1.5 sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .15em .8em; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #f3f6f8 }
td { overflow-wrap: anywhere } svg { width: 100%; height: auto } svg text { font-size: 11px; fill: #555 }
</style></head><body>
"""


@dataclass
class Stages:
    """Progress as it is told, passed on, and the seconds of each stage."""

    tell: Callable[[str, int, int], None]
    seconds: dict[str, float] = field(default_factory=dict)
    passages: dict[str, int] = field(default_factory=dict)
    """Done in that time; not those that were done before."""
    _begun: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __call__(self, stage: str, done: int, total: int) -> None:
        begun, before = self._begun.setdefault(stage, (time.monotonic(), done))
        self.seconds[stage], self.passages[stage] = time.monotonic() - begun, done - before
        self.tell(stage, done, total)


@dataclass(frozen=True, slots=True)
class Survey:
    """What is in a snapshot."""

    n_documents: int
    words: NDArray[np.int64]
    """How many passages have 0, 1, ... MOST_WORDS words; the last ones that many or more."""
    n_words: int
    """Of all passages."""
    n_repeated: int
    """Passages whose very text has stood before."""
    most_repeated: tuple[tuple[int, str, str], ...]
    """How often, the first document that has it, and how it begins."""
    languages: Counter[str]


def survey(passages: SnapshotPassages) -> Survey:
    """Read all of them once; 8 bytes of memory each. Those of a document lie together."""
    digests = np.empty(len(passages), np.uint64)
    words, n_words = np.zeros(MOST_WORDS + 1, np.int64), 0
    languages: Counter[str] = Counter()
    n_documents, last = 0, None
    for passage in passages:
        digests[passage.id] = int.from_bytes(blake2b(passage.text.encode(), digest_size=8).digest(), "little")
        n = len(passage.text.split())
        words[min(n, MOST_WORDS)] += 1
        n_words += n
        if passage.document_id != last:
            n_documents, last = n_documents + 1, passage.document_id
            if passage.origin and passage.origin.language:
                languages[passage.origin.language] += 1
    _, rows, counts = np.unique(digests, return_index=True, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:N_REPEATED]
    repeated = []
    for row, count in zip(rows[most].tolist(), counts[most].tolist(), strict=True):
        if count > 1:
            repeated.append((count, passages[row].document_id, passages[row].text[:80]))
    return Survey(n_documents, words, n_words, int(len(digests) - len(rows)), tuple(repeated), languages)


def write_report(
    path: Path, snapshot: Path, stages: Stages, failures: Sequence[Failure], changes: Changes | None
) -> None:
    """The page of a snapshot that was built just now."""
    passages = SnapshotPassages(snapshot)
    whole = page(snapshot.name, passages.snapshot.manifest, survey(passages), stages, failures, changes)
    files.write(path, whole.encode(errors="replace").decode())  # paths are of any bytes


def page(
    name: str,
    manifest: Manifest,
    found: Survey,
    stages: Stages,
    failures: Sequence[Failure],
    changes: Changes | None,
) -> str:
    """All of it."""
    parts = [HEAD, f"<h1>{escape(name)}</h1>", _table((), _facts(manifest, found))]
    if manifest.recall:
        shares = [(str(k), f"{share:.4f}") for k, share in manifest.recall.by_k().items()]
        how = {"exact": "by proof", "given": "with the questions given", "perturbed": "with stored vectors and noise"}
        parts += ["<h2>Recall</h2>", _table(("at", how[manifest.recall.queries]), shares)]
    parts += ["<h2>Words of a passage</h2>", _bars(found.words)]
    if changes:
        parts += ["<h2>Since the former snapshot</h2>", _table(("documents", "", ""), _changed(changes))]
    if found.languages:
        rows = [(language, f"{n:,}") for language, n in found.languages.most_common()]
        parts += ["<h2>Languages</h2>", _table(("of documents that say theirs", ""), rows)]
    if found.most_repeated:
        rows3 = [(text, document, f"{n:,}") for n, document, text in found.most_repeated]
        parts += ["<h2>Texts that repeat</h2>", _table(("passage", "first in", "times"), rows3)]
    timed = [
        (stage, f"{seconds:,.1f}", f"{stages.passages[stage]:,}", f"{stages.passages[stage] / max(seconds, 1e-9):,.0f}")
        for stage, seconds in stages.seconds.items()
    ]
    parts += ["<h2>Time</h2>", _table(("stage", "seconds", "passages", "a second"), timed)]
    if failures:
        more = f"<p>The first {N_SHOWN} of {sum(each.n for each in failures):,}.</p>" if len(failures) > N_SHOWN else ""
        listed = [(each.path, each.reason) for each in failures[:N_SHOWN]]
        parts += ["<h2>Left out</h2>", more, _table(("what", "why"), listed)]
    return "".join([*parts, "</body></html>\n"])


def _facts(manifest: Manifest, found: Survey) -> list[tuple[str, str]]:
    size = sum(file.size_bytes for shard in manifest.shards for file in shard.files)
    n = manifest.n_passages
    return [
        ("snapshot", manifest.snapshot_id),
        ("made", manifest.created_at),
        ("documents", f"{found.n_documents:,}"),
        ("passages", f"{n:,}"),
        ("words of a passage, on average", f"{found.n_words / n:.1f}"),
        ("passages whose text has stood before", f"{found.n_repeated:,} ({found.n_repeated / n:.2%})"),
        ("shards", str(len(manifest.shards))),
        ("index", manifest.factory),
        ("encoder", f"{manifest.encoder}, {manifest.dimension} numbers"),
        ("vectors that scores come from", manifest.exact_dtype or "float32"),
        ("size", f"{size / 1e6:,.1f} MB, {size / n:,.0f} bytes a passage"),
    ]


def _changed(changes: Changes) -> list[tuple[str, ...]]:
    rows = [("added", changes.added), ("changed", changes.changed), ("removed", changes.removed)]
    named = [(name, f"{each.n:,}", ", ".join(each.first)) for name, each in rows]
    kept = f"{changes.n_kept:,} of {changes.n_passages:,} passages keep their vectors"
    return [*named, ("as before", f"{changes.n_as_before:,}", kept)]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if titles else ''}{body}</table>"


def _bars(counts: NDArray[np.int64]) -> str:
    """A bar for every few numbers of words."""
    longest = int(np.flatnonzero(counts)[-1])
    end = f"{longest} or more" if longest == MOST_WORDS else f"{longest}"
    step = -(-(longest + 1) // N_BARS)
    bars = [int(counts[i : i + step].sum()) for i in range(0, longest + 1, step)]
    width, height, top = 900 / len(bars), 180, max(bars)
    drawn = []
    for i, n in enumerate(bars):
        tall = height * n / top
        words = f"{i * step}" if step == 1 else f"{i * step} to {(i + 1) * step - 1}"
        if (i + 1) * step > MOST_WORDS:
            words = f"{i * step} or more"
        drawn.append(
            f'<rect x="{i * width:.1f}" y="{20 + height - tall:.1f}" width="{width - 1:.1f}" height="{tall:.1f}" '
            f'fill="#2a6f97"><title>{words} words: {n:,} passages</title></rect>'
        )
    label = f"Passages by their number of words, up to {end}; the highest bar is {top:,} passages"
    return (
        f'<svg viewBox="0 0 900 {height + 40}" role="img" aria-label="{label}">{"".join(drawn)}'
        f'<text x="0" y="{height + 36}">0</text><text x="900" y="{height + 36}" text-anchor="end">{end} words'
        f'</text><text x="0" y="12">{top:,}</text></svg>'
    )
