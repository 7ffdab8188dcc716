"""Random questions to openbook, in a batch and alone, and to transformers: what was asked how often, and who differs.

    python benchmarks/bench_identity.py [2048]

The questions and the comparison are those of the unit tests (tests/unit/models/identity.py). Prints a table, every
difference with its gap in log p(y|x), and one JSON line; ends with 1 if there was any.
"""

import json
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/unit/models"))

import torch
import transformers
from identity import MAX_K, Verdict, verdicts
from rich.console import Console
from rich.progress import track
from rich.table import Table

from openbook.core.types import Formulation


def covers(verdict: Verdict) -> dict[str, str]:
    """What a question asks for, by name and value as the table shows them."""
    settings, step = verdict.settings, 10
    first = (verdict.k - 1) // step * step + 1
    way = "RAG-Token"
    if settings.formulation is Formulation.SEQUENCE:
        way = f"RAG-Sequence, {settings.decoding}"
    return {
        "formulation": way,
        "beams": str(settings.n_beams),
        "length penalty": str(settings.length_penalty),
        "early stopping": str(settings.early_stopping),
        "passages": f"{first:2} to {first + step - 1}",
        "context lengths": "mixed" if len(verdict.lengths) > 1 else "equal",
        "answer tokens": f"at most {settings.max_new_tokens}",
    }


def report(asked: list[Verdict], console: Console) -> None:
    """The table of what was asked, then the differences."""
    table = Table("of", "", "questions", "differ from transformers", "differ alone")
    columns = [list(covers(verdict).items()) for verdict in asked]
    counts = Counter(key for column in columns for key in column)
    differ = Counter(key for column, v in zip(columns, asked, strict=True) if not v.agrees for key in column)
    unstable = Counter(key for column, v in zip(columns, asked, strict=True) if not v.stable for key in column)
    for name in covers(asked[0]):
        for key in sorted(key for key in counts if key[0] == name):
            table.add_row(*key, str(counts[key]), str(differ[key]), str(unstable[key]))
        table.add_section()
    console.print(table)
    console.print(
        f"{len({v.k for v in asked})} of {MAX_K} numbers of passages, {len(distinct(asked))} distinct answers"
    )
    for v in asked:
        if not (v.agrees and v.stable):
            answers = f"{v.ours.token_ids}, alone {v.alone.token_ids}, transformers {v.theirs}"
            console.print(f"question {v.question}: {answers}, gap {v.gap:.3g} nats; {v.settings}", highlight=False)


def distinct(asked: list[Verdict]) -> set[tuple[int, ...]]:
    """The answers given."""
    return {v.ours.token_ids for v in asked}


def main() -> None:
    """Ask, count, tell."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    console, start = Console(width=100), time.monotonic()
    asked = list(track(verdicts(n), "asking", total=n, console=Console(stderr=True)))
    report(asked, console)
    differ, unstable = sum(not v.agrees for v in asked), sum(not v.stable for v in asked)
    summary = {
        "benchmark": "identity",
        "questions": n,
        "distinct_answers": len(distinct(asked)),
        "differ_from_transformers": differ,
        "differ_alone": unstable,
        "largest_gap": max(abs(v.gap) for v in asked),
        "seconds": round(time.monotonic() - start),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(summary))
    sys.exit(bool(differ or unstable))


if __name__ == "__main__":
    main()
