"""This machine measured in some minutes: small tiers are built, served and asked; models answer; the disk is read."""

import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from math import log2
from pathlib import Path
from time import monotonic, process_time

import numpy as np

from openbook.config import ServedEncoderSettings, ServedGeneratorSettings
from openbook.core.types import GenerationSettings, Retrieved
from openbook.planning.constants import Calibration
from openbook.planning.measure import Served, Texts, build, served
from openbook.planning.model import Shape

OnStep = Callable[[str, int, int], None]
"""Called with what is measured, and how much of it is done."""

EMPTY = (1000, 256, "Flat", 1)
TIERS = (
    EMPTY,
    (1000, 256, "Flat", 2),
    (40_000, 64, "Flat", 1),
    (40_000, 256, "Flat", 1),
    (40_000, 256, "IVF256,SQ8", 1),
    (10_000, 256, "HNSW32", 1),
)
SECONDS = 2.0
READ_BYTES = 4096
N_READS = 300
N_PASSAGES = 5
QUESTIONS = tuple(
    f"who wrote the {word} book about rivers?" for word in ("first", "second", "third", "fourth", "fifth")
)
CPUINFO = Path("/proc/cpuinfo")


def calibrate(on_step: OnStep = lambda what, done, total: None, models: bool = True) -> Calibration:
    """Measure it. What the models take is left out where they are not installed."""
    steps = len(TIERS) + 2
    found: dict[tuple[int, int, str, int], Served] = {}
    with tempfile.TemporaryDirectory(prefix="openbook-calibrate-") as folder:
        for n_done, tier in enumerate(TIERS):
            on_step(f"{tier[2]}, {tier[0]} x {tier[1]}", n_done, steps)
            n, dimension, factory, n_shards = tier
            snapshot = build(Path(folder) / str(n_done), n, dimension, factory, n_shards)
            found[tier] = served(snapshot, dimension, SECONDS)
        on_step("disk", len(TIERS), steps)
        values = {**_of_tiers(found), "rescored_s": _random_read_s(Path(folder) / "2" / "shard-0000" / "vectors.npy")}
    on_step("models", len(TIERS) + 1, steps)
    if models:
        values |= _of_models()
    on_step("models", steps, steps)
    return Calibration(machine=machine(), date=f"{datetime.now(UTC):%Y-%m-%d}", values=values)


def machine() -> str:
    """The processor, and how many cores of it."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    named = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{os.cpu_count()} cores of {named}"


def _of_tiers(found: dict[tuple[int, int, str, int], Served]) -> dict[str, float]:
    """Each tier adds what the ones before it do not explain."""
    empty, two, short, flat, codes, graph = (found[tier] for tier in TIERS)
    values = {
        "server_bytes": empty.memory_bytes - 1000 * 256 * 4,
        "call_s": empty.alone_s,
        "shard_s": max(0.0, two.alone_s - empty.alone_s),
        "call_cpu_s": empty.server_cpu_s,
        "client_cpu_s": empty.client_cpu_s,
    }
    rows, d_short, d = 40_000, 64, 256
    many = [max(0.0, each.server_cpu_s - empty.server_cpu_s) for each in (short, flat)]
    values["flat_s"] = max(0.0, many[1] - many[0]) / (rows * (d - d_short))
    values["flat_row_s"] = max(0.0, many[1] / rows - d * values["flat_s"])
    alone = [max(0.0, each.alone_s - empty.alone_s) for each in (short, flat)]
    values["flat_alone_s"] = max(0.0, alone[1] - alone[0]) / (rows * (d - d_short) * 4)
    values["flat_row_alone_s"] = max(0.0, alone[1] / rows - 4 * d * values["flat_alone_s"])
    shape = Shape(40_000, d, "IVF256,SQ8")
    scanned = shape.n_passages * shape.n_probes / shape.n_lists * shape.code_bytes
    values["codes_alone_s"] = max(0.0, codes.alone_s - empty.alone_s) / scanned
    values["codes_s"] = max(0.0, codes.server_cpu_s - empty.server_cpu_s) / scanned
    values["lists_s"] = 0.0  # it is in them
    steps = log2(10_000) * d
    values["graph_alone_s"] = max(0.0, graph.alone_s - empty.alone_s) / steps
    values["graph_s"] = max(0.0, graph.server_cpu_s - empty.server_cpu_s) / steps
    return values


def _random_read_s(path: Path) -> float:
    """Of a page of a file that is not in memory, as far as the system can be made to forget it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        size, taken = os.fstat(descriptor).st_size, []
        for i in range(N_READS):
            began = monotonic()
            os.pread(descriptor, READ_BYTES, (i * 104_729 * READ_BYTES) % max(1, size - READ_BYTES))
            taken.append(monotonic() - began)
        return statistics.mean(taken)
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
