"""`openbook plan` held against reality: what it predicts of an index tier beside what was measured of one.

    python benchmarks/bench_plan.py [--calibration FILE] [--tiny] [--out FILE]

First this machine is calibrated, unless a file says how it did. Then tiers of other sizes, dimensions, indices and
numbers of shards than those are built of generated vectors, served by a process of one thread a shard, and asked.
Columns:

- memory: resident, of all servers; disk: of the snapshot with its words.
- p50: of one query by itself, by the wall clock, in the quietest of eight rounds.
- rate: queries a second for which the busiest server has CPU time, 64 callers with one query each.

Each as predicted, as measured, and by how much the prediction is off.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from openbook.planning.calibrate import calibrate
from openbook.planning.constants import Calibration, Constants, calibrated, constants
from openbook.planning.measure import WORDS, Served, Texts, build, served
from openbook.planning.model import Shape, memory, sizes, times

SECONDS = 2.0
CONFIGURATIONS = (
    Shape(20_000, 768, "Flat", 1),
    Shape(70_000, 256, "Flat", 1),
    Shape(70_000, 256, "Flat", 2),
    Shape(20_000, 256, "HNSW32", 1),
    Shape(12_000, 384, "HNSW32", 2),
    Shape(60_000, 384, "IVF256,SQ8", 1),
    Shape(70_000, 256, "IVF256,SQ8", 2),
    Shape(20_000, 768, "IVF128,SQ8", 1),
    Shape(200_000, 256, "Flat", 1),
    Shape(50_000, 768, "HNSW32", 1),
    Shape(1_000_000, 256, "IVF1024,SQ8", 1),
)
TINY = (Shape(600, 16, "Flat", 1), Shape(800, 16, "IVF16,SQ8", 2))
WANTED = 0.2


def predicted(shape: Shape, c: Constants) -> dict[str, float]:
    """What the plan's model says."""
    taken = times(shape, c)
    return {
        "memory, MB": memory(shape, c).wanted / 1e6,
        "disk, MB": sizes(shape, c).snapshot / 1e6,
        "p50, ms": taken.alone * 1e3,
        "rate": shape.n_shards / taken.server_cpu,
    }


def measured(found: Served) -> dict[str, float]:
    """The same of what was seen."""
    return {
        "memory, MB": found.memory_bytes / 1e6,
        "disk, MB": found.disk_bytes / 1e6,
        "p50, ms": found.p50_s * 1e3,
        "rate": found.rate,
    }


def of_these_texts(c: Constants) -> Constants:
    """The generated ones: of other words than real ones, which is what a user knows of his."""
    texts = [Texts(1000)[i] for i in range(1000)]
    n_words = 1000 * WORDS
    own = {
        "bytes_per_word": sum(len(each.text.encode()) for each in texts) / n_words,
        "title_bytes": sum(len((each.title + each.document_id).encode()) for each in texts) / 1000,
        "words_indexed": sum(len(set(each.text.split())) for each in texts) / n_words,
    }
    return {name: replace(constant, value=own.get(name, constant.value)) for name, constant in c.items()}


def compared(shapes: tuple[Shape, ...], c: Constants) -> Iterator[dict[str, object]]:
    """A row each."""
    for shape in shapes:
        shape = replace(shape, n_words=WORDS, has_origins=False)
        with tempfile.TemporaryDirectory(prefix="openbook-plan-") as folder:
            snapshot = build(Path(folder) / "s", shape.n_passages, shape.dimension, shape.index, shape.n_shards, True)
            found = served(snapshot, shape.dimension, SECONDS)
        what = f"{shape.index}, {shape.n_passages:,} x {shape.dimension}" + (
            ", 2 shards" if shape.n_shards == 2 else ""
        )
        yield {"what": what, "predicted": predicted(shape, c), "measured": measured(found)}


def cells(row: dict[str, object]) -> list[str]:
    """One line of the table; what is further off than wanted is bold."""
    before, after = row["predicted"], row["measured"]
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    found = [str(row["what"])]
    for name, value in after.items():
        off = before[name] / value - 1
        said = f"{off:+.0%}"
        found.append(f"{before[name]:.3g} / {value:.3g} ({f'**{said}**' if abs(off) > WANTED else said})")
    return found


def main() -> None:
    """Calibrate, build, serve, ask, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, help="the table in Markdown")
    args = parser.parse_args()
    if args.calibration:
        c = constants(args.calibration)
    else:
        found: Calibration = calibrate(models=not args.tiny)
        print(yaml.safe_dump(found.model_dump(), sort_keys=False))
        c = calibrated(found)
    rows = []
    for row in compared(TINY if args.tiny else CONFIGURATIONS, of_these_texts(c)):
        rows.append(row)
        print(json.dumps(row), flush=True)
    titles = ["predicted / measured", *rows[0]["measured"]]  # type: ignore[misc]
    table = Table(*titles)
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        table.add_row(*cells(row))
        lines.append(f"| {' | '.join(cells(row))} |")
    Console(width=160).print(table)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
