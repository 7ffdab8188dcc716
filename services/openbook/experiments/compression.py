"""What a compressed index costs: kinds of index over the same vectors, their recall, exact match, bytes and time."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from time import perf_counter

import numpy as np

from openbook.config import EncoderSettings
from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Passage
from openbook.errors import InvalidConfig
from openbook.evaluation.run import to_ask
from openbook.evaluation.settings import EvaluationSettings
from openbook.evaluation.summary import Mean
from openbook.experiments.asking import SEQUENCE, Asked, OnProgress, ask, difference, em, found_at
from openbook.experiments.pictures import Axes, Series, drawn
from openbook.experiments.report import Cell, Expected, Report, Table
from openbook.index.building.build import build_snapshot
from openbook.index.disk.passages import SnapshotPassages
from openbook.index.disk.snapshot import INDEX, Manifest, Snapshot
from openbook.index.shard.engine import Index
from openbook.index.shard.shard import Shard
from openbook.models.encoder import TextEncoder

DATA = ("squad-dev", "entityquestions-dev")
KINDS = ("Flat", "SQ8", "HNSW32", "IVF{n},Flat", "IVF{n},SQ8", "IVF{n},RaBitQfs", "IVF{n},PQ{m}x4fs", "IVF{n},PQ{b}")
"""See `made_for`."""
PATIENCE_S = 60.0
TICKS = (20, 50, 100, 200, 500, 1000, 2000, 5000)

ABOUT = (
    "The same vectors in indexes of several kinds, one shard each, searched as their builds chose. FAISS finds "
    "candidates among compressed vectors, four for each hit, and openbook scores these anew from the exact ones: "
    "what is lost is what was not among the candidates. The same questions, the same generator: exact match falls "
    "where recall does.",
    "Bytes are of what is searched, the index file; the exact vectors and the texts lie beside it on disk, and of "
    "them only candidates are read. Milliseconds are of one query at a time on one thread.",
)


class Settings(EvaluationSettings):
    """What the experiment is told."""

    factories: tuple[str, ...] = ()  # of FAISS; KINDS if none is named


@dataclass(frozen=True, slots=True)
class Kind:
    """One index, and what it gave."""

    factory: str
    manifest: Manifest
    recall: dict[int, float]  # at k, of the questions
    bytes_per_passage: float
    ms: float  # median
    asked: Asked


def run(settings: Settings, command: str, on_progress: OnProgress) -> Report:
    """Build each index, search it, ask. Raises OpenbookError as `Index.from_factory`, `build_snapshot` and `ask`."""
    if settings.snapshot is None:
        raise InvalidConfig("the experiment compression needs a snapshot, whose vectors are put into other indexes")
    vectors, passages, source = _read(settings.snapshot)
    factories = [made_for(each, *vectors.shape) for each in settings.factories or KINDS]
    for factory in factories:  # all of them before the first takes its hour
        Index.from_factory(factory, vectors.shape[1])
    queries = _queries(settings)
    with tempfile.TemporaryDirectory(prefix="openbook-compression-") as folder:
        outs = [Path(folder) / str(number) for number in range(len(factories))]
        manifests = []
        for number, factory in enumerate(factories):  # all before the first is asked: FAISS may not train one on so few
            on_progress("kinds of index", number, len(factories))
            manifests.append(
                build_snapshot(passages, vectors, outs[number], 1, factory, source.encoder, source.encoder_fingerprint,
                               queries=queries)
            )  # fmt: skip
        on_progress("kinds of index", len(factories), len(factories))
        kinds = []
        for factory, manifest, out in zip(factories, manifests, outs, strict=True):
            asked = ask(settings.model_copy(update={"snapshot": out}), [SEQUENCE], on_progress)
            kinds.append(_measured(factory, manifest, out, queries, asked))
    return _report(settings, command, kinds)


def made_for(factory: str, n_passages: int, dimension: int) -> str:
    """With {n} about 2 √N for N passages; {m} and {b} divide the d dimensions, and are d / 8 and 8 at most."""

    def divisor(most: int) -> int:  # a product quantizer's parts are equally long
        return next((n for n in range(most, 0, -1) if dimension % n == 0), 1)

    cells = min(2 * isqrt(n_passages), max(1, n_passages // 39))  # FAISS wants 39 vectors for each
    numbers = {"{n}": cells, "{m}": divisor(dimension // 8), "{b}": divisor(8)}
    for name, number in numbers.items():
        factory = factory.replace(name, str(number))
    return factory


def _read(folder: Path) -> tuple[Float32, Sequence[Passage], Manifest]:
    snapshot = Snapshot.open(folder)
    return snapshot.vectors(), list(SnapshotPassages(folder)), snapshot.manifest


def _queries(settings: Settings) -> Float32:
    encoder = TextEncoder.load(EncoderSettings.model_validate(settings.encoder.model_dump()))
    texts = [each.text for path in settings.questions for each in to_ask(path, settings)]
    size = settings.encoder.max_batch
    return np.concatenate([encoder.encode_questions(texts[i : i + size]) for i in range(0, len(texts), size)])


def _measured(factory: str, manifest: Manifest, folder: Path, queries: Float32, asked: Asked) -> Kind:
    shard = Shard(folder, 0, verify=False)
    k, took = asked.plan["k"], []
    for query in queries:
        begun = perf_counter()
        shard.search(query[None], k, Deadline.after(PATIENCE_S))
        took.append(perf_counter() - begun)
    n_bytes = (Snapshot.open(folder).shard_folder(0) / INDEX).stat().st_size
    assert manifest.recall is not None
    n_passages = asked.plan["index"]["n_passages"]
    return Kind(factory, manifest, manifest.recall.by_k(), n_bytes / n_passages, 1000 * float(np.median(took)), asked)


def _report(settings: Settings, command: str, kinds: Sequence[Kind]) -> Report:
    first = kinds[0].asked
    flat = next((each for each in kinds if each.factory == "Flat"), kinds[0])
    recalls = [_point(each, Mean(each.recall[5], each.recall[5], each.recall[5])) for each in kinds]
    points = [_point(each, each.asked.mean(SEQUENCE, em)) for each in kinds]
    return Report(
        title="Compressed indexes",
        about=ABOUT,
        command=command,
        made_of=[row for row in first.made_of if not row[0].startswith("index: ")] + [
            ("index: n passages", str(first.plan["index"]["n_passages"])),
            ("taken from", Snapshot.open(settings.snapshot or Path()).manifest.snapshot_id),
        ],
        expected=[
            *(Expected("recall at 5 of Flat, which is exact", each.recall[5], 1.0, 1.0)
              for each in kinds if each.factory == "Flat"),
            *(_worse(each, flat) for each in kinds if each is not flat),
        ],
        pictures=[
            ("Recall at 5 against exact search, per cent", drawn(
                Axes("bytes per passage searched", "recall at 5, per cent", log_x=True, joined=False, ticks=TICKS),
                recalls)),
            ("Exact match, per cent", drawn(
                Axes("bytes per passage searched", "exact match, per cent", log_x=True, joined=False, ticks=TICKS),
                points)),
        ],
        tables=[Table(
            "Kinds of index",
            ("factory", "bytes per passage", "recall at 1", "at 5", "at 10", "at 100", "ms a query", "searched with",
             "an answer in the first 5, per cent", "exact match, per cent"),
            [_row(each) for each in kinds],
            about="Recall: of the exact first k passages, the share that is found; measured with these questions.",
        )],
        plan={**first.lasting_plan, "factories": [each.factory for each in kinds]},
        numbers={
            **{f"recall at 5, {each.factory}": each.recall[5] for each in kinds},
            **{f"exact match, {each.factory}": each.asked.mean(SEQUENCE, em).value for each in kinds},
        },
    )  # fmt: skip


def _point(kind: Kind, mean: Mean) -> Series:
    return Series(kind.factory, [kind.bytes_per_passage], [mean], [kind.factory])


def _worse(kind: Kind, flat: Kind) -> Expected:
    lost = difference(kind.asked.of(SEQUENCE), flat.asked.of(SEQUENCE), em)
    return Expected(
        f"exact match of {kind.factory} less that of {flat.factory}, upper end of the difference", lost.high, 0.0, 1.0
    )


def _row(kind: Kind) -> list[Cell]:
    search = kind.manifest.search.model_dump(exclude_none=True) if kind.manifest.search else {}
    return [
        kind.factory,
        f"{kind.bytes_per_passage:,.0f}",
        *(f"{kind.recall[k]:.3f}" for k in (1, 5, 10, 100)),
        f"{kind.ms:.2f}",
        ", ".join(f"{name} {value}" for name, value in search.items()) or "–",
        kind.asked.mean(SEQUENCE, found_at(5)),
        kind.asked.mean(SEQUENCE, em),
    ]
