"""Decoding beside transformers' RAG classes: same weights, same thread, in turn, CPU time, outputs asserted identical.

    python benchmarks/bench_decode.py [--real 180] [--padded 300] [--new-tokens 16] [--d-model 512] [--repeat 2]

transformers gets the attention mask that its RAG-Sequence forgets; what padding costs it, it pays. The weights are
random, which is the worst case for giving up candidates: none of them stands out. How many candidates differ decides
how often transformers encodes all passages again. Where the processor multiplies bfloat16, our time in that is shown
too, beside our float32 (answers may differ there by rounding). Prints a table, and one JSON line.
"""

import argparse
import copy
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from rag_side_by_side import EOS, PAD, SIZES, build, rag
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from openbook.core.types import Formulation, GenerationSettings
from openbook.models.decoding import Seq2Seq, generate

# formulation, beams, passages, questions in a batch (which RAG-Sequence of transformers takes one by one)
CASES = [
    (Formulation.TOKEN, 4, 5, 8),
    (Formulation.TOKEN, 4, 10, 8),
    (Formulation.SEQUENCE, 4, 5, 2),
    (Formulation.SEQUENCE, 4, 10, 2),
    (Formulation.SEQUENCE, 1, 50, 1),
]


def theirs(oracle: Any, ids: Tensor, mask: Tensor, scores: Tensor, settings: GenerationSettings) -> list[list[int]]:
    """transformers' answers, decoder start and padding removed."""
    k = scores.shape[1]
    starts = iter(range(0, len(ids), k))
    original = oracle.generator.generate

    def with_mask(inputs: Tensor, **kwargs: Any) -> Tensor:
        start = next(starts)
        kwargs["attention_mask"] = mask[start : start + k]
        answers: Tensor = original(inputs, **kwargs)
        return answers

    oracle.generator.generate = with_mask
    try:
        rows = oracle.generate(
            context_input_ids=ids,
            context_attention_mask=mask,
            doc_scores=scores,
            num_beams=settings.n_beams,
            max_length=settings.max_new_tokens + 1,
            min_new_tokens=settings.min_new_tokens,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=EOS,
        )
    finally:
        del oracle.generator.generate
    return [[token for token in row[1:] if token != PAD] for row in rows.tolist()]


def measure(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and what came out."""
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"real": 180, "padded": 300, **SIZES}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("new-tokens", 16), ("repeat", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="which of the five")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = build(args)
    readers = {"ours": Seq2Seq(model)}
    if torch.cpu.get_capabilities().get("avx512_bf16"):
        readers["bfloat16"] = Seq2Seq(copy.deepcopy(model).bfloat16())
    rows = [
        run(model, readers, *CASES[case], args) for case in track(args.cases, "Cases", console=Console(stderr=True))
    ]
    _report(rows, args)


def run(
    model: Any, readers: dict[str, Seq2Seq], formulation: Formulation, n_beams: int, k: int, n: int, args: Any
) -> dict[str, Any]:
    """One case: seconds of CPU time per question, the least of `repeat` turns. Ends the program if answers differ."""
    random = torch.Generator().manual_seed(k)
    real = (torch.arange(args.padded) < args.real).long().expand(n * k, -1)
    ids = torch.randint(5, args.vocabulary, (n * k, args.padded), generator=random).masked_fill(real == 0, PAD)
    scores = torch.randn(n, k, generator=random)
    settings = GenerationSettings(formulation=formulation, n_beams=n_beams, max_new_tokens=args.new_tokens)
    oracle = rag(model, formulation, k)
    seconds: dict[str, float] = {}
    for _ in range(args.repeat):
        taken, wanted = measure(lambda: theirs(oracle, ids, real, scores, settings))
        seconds["transformers"] = min(taken / n, seconds.get("transformers", taken))
        for name, reader in readers.items():
            taken, answers = measure(lambda: generate(reader, ids, real, scores, settings))  # noqa: B023
            seconds[name] = min(taken / n, seconds.get(name, taken))
            if name == "ours" and [list(answer.token_ids) for answer in answers] != wanted:
                sys.exit(f"{formulation} with {n_beams} beams and {k} passages: answers differ")
    return {"formulation": str(formulation), "n_beams": n_beams, "k": k, "n_questions": n, "cpu_s": seconds}


def _report(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table("formulation", "beams", "passages", "transformers s", "ours s", "times", "bfloat16 s", "times more")
    for row in rows:
        cpu_s = row["cpu_s"]
        figures = [cpu_s["transformers"], cpu_s["ours"], cpu_s["transformers"] / cpu_s["ours"]]
        if "bfloat16" in cpu_s:
            figures += [cpu_s["bfloat16"], cpu_s["ours"] / cpu_s["bfloat16"]]
        table.add_row(row["formulation"], str(row["n_beams"]), str(row["k"]), *(f"{figure:.2f}" for figure in figures))
    Console().print(table)
    summary = {
        "benchmark": "decode",
        "settings": vars(args) | {"cases": list(args.cases)},
        "cases": rows,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
