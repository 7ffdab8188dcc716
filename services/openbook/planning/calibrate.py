"""This machine measured in some minutes: small tiers are built, served and asked; models answer; the disk is read."""

import os
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from math import log2
from operator import attrgetter
from pathlib import Path
from time import monotonic, process_time

import numpy as np

from openbook.config import ServedEncoderSettings, ServedGeneratorSettings
from openbook.core.types import GenerationSettings, Retrieved
from openbook.planning.constants import Calibration
from openbook.planning.measure import Served, Texts, build, served
from openbook.planning.model import RERANKED, Shape
from openbook.processes import processor

OnStep = Callable[[str, int, int], None]
"""Called with what is measured, and how much of it is done."""

Tier = tuple[int, int, str, int]
"""Passages, numbers of each, index, shards."""
EMPTY: Tier = (1000, 16, "Flat", 1)
FLAT: Tier = (40_000, 256, "Flat", 1)
CODES: Tier = (40_000, 256, "IVF256,SQ8", 1)
TWO: Tier = (80_000, 256, "IVF256,SQ8", 2)
LARGE: Tier = (500_000, 256, "IVF256,SQ8", 1)  # more than the caches of most processors hold
GRAPH_SHORT: Tier = (40_000, 128, "HNSW32", 1)
GRAPH: Tier = (40_000, 768, "HNSW32", 1)
TIERS = (EMPTY, FLAT, CODES, TWO, LARGE, GRAPH_SHORT, GRAPH)
SECONDS = 2.0
READ_BYTES = 4096
N_AT_ONCE = 10 * RERANKED
N_READS = 8 * N_AT_ONCE
STRIDE_BYTES = 104_729 * READ_BYTES
N_PASSAGES = 5
QUESTIONS = tuple(
    f"who wrote the {word} book about rivers?" for word in ("first", "second", "third", "fourth", "fifth")
)
ON_DISK = "/var/tmp"
"""Where nobody says otherwise: /tmp is memory on many machines, of which no read would ask the disk."""


def calibrate(on_step: OnStep = lambda what, done, total: None, models: bool = True) -> Calibration:
    """Measure it. What the models take is left out where they are not installed."""
    steps = len(TIERS) + 2
    found: dict[Tier, Served] = {}
    place = os.environ.get("TMPDIR") or ON_DISK
    with tempfile.TemporaryDirectory(prefix="openbook-calibrate-", dir=place) as folder:
        for n_done, tier in enumerate(TIERS):
            on_step(f"{tier[2]}, {tier[0]} x {tier[1]}", n_done, steps)
            n, dimension, factory, n_shards = tier
            snapshot = build(Path(folder) / str(n_done), n, dimension, factory, n_shards)
            found[tier] = served(snapshot, dimension, SECONDS)
        on_step("disk", len(TIERS), steps)
        flat = Path(folder) / str(TIERS.index(FLAT))
        values = {**_of_tiers(found), "rescored_s": _random_read_s(flat / "shard-0000" / "vectors.npy")}
    on_step("models", len(TIERS) + 1, steps)
    if models:
        values |= _of_models()
    on_step("models", steps, steps)
    return Calibration(machine=machine(), date=f"{datetime.now(UTC):%Y-%m-%d}", values=values)


def machine() -> str:
    """The processor, and how many cores of it."""
    return f"{os.cpu_count()} cores of {processor()}"


def _of_tiers(found: dict[Tier, Served]) -> dict[str, float]:
    """Each tier adds what the ones before it do not explain."""
    empty = found[EMPTY]
    values = {
        "server_bytes": empty.memory_bytes - EMPTY[0] * EMPTY[1] * 4,
        "shard_s": max(0.0, found[TWO].p50_s - found[CODES].p50_s),
        "client_cpu_s": empty.client_cpu_s,
    }
    codes, large = Shape(*CODES), Shape(*LARGE)
    for call, how, seconds in (
        ("call_s", "alone_s", attrgetter("p50_s")),
        ("call_cpu_s", "s", attrgetter("server_cpu_s")),
    ):
        flat, values[call] = _line(EMPTY[0] * EMPTY[1], seconds(empty), FLAT[0] * FLAT[1], seconds(found[FLAT]))
        more = {tier: max(0.0, seconds(found[tier]) - values[call]) for tier in TIERS}
        in_codes, in_large = (
            more[tier] - shape.n_lists * shape.dimension * flat for tier, shape in ((CODES, codes), (LARGE, large))
        )
        code, cells = _line(codes.scanned_bytes, in_codes, large.scanned_bytes, in_large)
        in_short, in_long = (more[tier] / log2(tier[0]) for tier in (GRAPH_SHORT, GRAPH))
        graph, step = _line(GRAPH_SHORT[1], in_short, GRAPH[1], in_long)
        values |= {
            f"flat_{how}": flat,
            f"codes_{how}": code,
            f"cells_{how}": cells,
            f"graph_{how}": graph,
            f"graph_step_{how}": step,
        }
    return values


def _line(x: float, y: float, larger_x: float, larger_y: float) -> tuple[float, float]:
    """a and b of y = a x + b through two measurements; none is negative, if need be only the larger one is met."""
    a = max(0.0, min((larger_y - y) / (larger_x - x), larger_y / larger_x))
    return a, max(0.0, larger_y - a * larger_x)


def _random_read_s(path: Path) -> float:
    """Of a page of a file that is not in memory, as far as the system can be made to forget it, where as many are asked
    for at once as a server asks for of one query."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        last, began = os.fstat(descriptor).st_size - READ_BYTES, monotonic()
        for first in range(0, N_READS, N_AT_ONCE):
            begins = [i * STRIDE_BYTES % last for i in range(first, first + N_AT_ONCE)]
            for begin in begins:
                os.posix_fadvise(descriptor, begin, READ_BYTES, os.POSIX_FADV_WILLNEED)
            for begin in begins:
                os.pread(descriptor, READ_BYTES, begin)
        return (monotonic() - began) / N_READS
    finally:
        os.close(descriptor)


def _of_models() -> dict[str, float]:
    """CPU time of the embedded encoder and generator for a question; nothing where they are not installed."""
    if not (find_spec("torch") and find_spec("transformers")):
        return {}
    from openbook.models.encoder import TextEncoder
    from openbook.models.generator import RagGenerator

    encoder = TextEncoder.load(ServedEncoderSettings())
    generator = RagGenerator.load(ServedGeneratorSettings(n_threads=1))
    passages = tuple(Texts(N_PASSAGES)[i] for i in range(N_PASSAGES))
    retrieved = Retrieved(passages, np.zeros(N_PASSAGES, np.float32), "")

    def generate() -> None:
        for question in QUESTIONS:
            generator.generate([question], [retrieved], GenerationSettings(n_beams=4))

    return {
        "encode_s": _cpu_s(lambda: encoder.encode_questions(QUESTIONS)) / len(QUESTIONS),
        "generate_s": _cpu_s(generate) / len(QUESTIONS),
    }


def _cpu_s(work: Callable[[], object]) -> float:
    """Of this process, the second time: the first one warms up."""
    work()
    began = process_time()
    work()
    return process_time() - began
