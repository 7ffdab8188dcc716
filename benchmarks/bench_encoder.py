"""Questions per second of the query encoder: one by one, in our batches, and the bare forward passes of those batches.

    python benchmarks/bench_encoder.py [--n 256] [--rounds 5] [--seed 0] [--questions FILE]

The embedded query encoder on one thread, in float32 and in bfloat16. Questions are words of the embedded corpus, as
many as people's questions have (5 to 20, most of them about 10), or those of a file. In turn, in every round:

- one by one: each question tokenised and computed by itself, unpadded, as up to 22 November 2026
- ours: `encode_questions`, up to 64 of one length at once, as the worker hands them over
- bare: the model's forward passes over the very tensors of ours, nothing else

and a question alone, padded and unpadded. Before that, all bits of ours are compared with those alone. Seconds are of
CPU time, the least of the rounds. Prints a table, and one JSON line.
"""

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from copy import copy
from itertools import groupby
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from openbook.config import EncoderSettings
from openbook.core.deadline import go_on
from openbook.core.types import Float32
from openbook.corpus.build import embedded_documents
from openbook.corpus.questions import read_questions
from openbook.corpus.read import read_passages
from openbook.models.encoder import TextEncoder, embed
from openbook.models.formats import pad

AT_ONCE = EncoderSettings().max_batch


def made_up(n: int, seed: int) -> list[str]:
    """Words of passages, 5 to 20 of them."""
    rng = random.Random(seed)
    texts = [passage.text.split() for passage in read_passages(embedded_documents())]
    return [" ".join(rng.choice(texts)[: int(rng.triangular(5, 20, 8))]) + "?" for _ in range(n)]


def portions(encoder: TextEncoder, questions: Sequence[str]) -> list[list[str]]:
    """As the worker gets them where enough of them wait: of one length, up to `max_batch`."""
    return [
        same[start : start + AT_ONCE]
        for _, group in groupby(sorted(questions, key=encoder.padded_length), encoder.padded_length)
        for same in [list(group)]
        for start in range(0, len(same), AT_ONCE)
    ]


def bare_batches(encoder: TextEncoder, portioned: Sequence[Sequence[str]]) -> list[tuple[Tensor, Tensor]]:
    """The tensors that `encode_questions` computes with."""
    found: list[tuple[Tensor, Tensor]] = []
    pad_id = encoder._tokenizer.pad_token_id

    def note(rows: Sequence[Sequence[int]], length: int) -> Float32:
        found.append(pad(rows, pad_id, length))
        return np.zeros((len(rows), 1), np.float32)

    batches = copy(encoder._batches)
    batches._compute = note
    for portion in portioned:
        for _ in batches.embed(encoder._tokenizer(list(portion))["input_ids"], go_on):
            pass
    return found


def run(dtype: str, questions: Sequence[str], rounds: int) -> dict[str, float]:
    """Seconds of everything for one dtype."""
    encoder = TextEncoder.load(EncoderSettings(dtype=dtype))
    portioned = portions(encoder, questions)
    alone = np.concatenate([encoder.encode_questions([question]) for portion in portioned for question in portion])
    together = np.concatenate([encoder.encode_questions(portion) for portion in portioned])
    if alone.tobytes() != together.tobytes():
        sys.exit(f"{dtype}: bits differ between one by one and in batches")
    tensors = bare_batches(encoder, portioned)
    few = questions[:32]

    @torch.inference_mode()
    def bare() -> None:
        for ids, mask in tensors:
            embed(encoder._model, encoder.pooling, ids, mask)

    def one_by_one(those: Sequence[str] = questions) -> None:
        for question in those:
            encoder._embed([encoder._tokenizer(question)["input_ids"]])

    def ours() -> None:
        for portion in portioned:
            encoder.encode_questions(portion)

    def padded_alone() -> None:
        for question in few:
            encoder.encode_questions([question])

    def tokenised() -> None:
        for portion in portioned:
            encoder._tokenizer(list(portion))

    runs: dict[str, Callable[[], None]] = {
        "one by one": one_by_one,
        "ours": ours,
        "bare": bare,
        "alone, unpadded": lambda: one_by_one(few),
        "alone, padded": padded_alone,
        "tokenizer": tokenised,
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in track(range(rounds), dtype, console=Console(stderr=True)):
        for name, call in runs.items():
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)
    n = {name: len(few) if name.startswith("alone") else len(questions) for name in runs}
    rate = {name: n[name] / min(taken) for name, taken in seconds.items()}
    ratios = [bare / ours for bare, ours in zip(seconds["bare"], seconds["ours"], strict=True)]
    return rate | {"ours / bare": float(np.median(ratios)), "batches": len(tensors)}


def main() -> None:
    """Both dtypes, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("n", 256), ("rounds", 5), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--questions", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.questions:
        texts = [question.text for question in read_questions(args.questions)]
        questions = random.Random(args.seed).sample(texts, min(args.n, len(texts)))
    else:
        questions = made_up(args.n, args.seed)
    dtypes = ["float32"] + ["bfloat16"] * bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    found = {dtype: run(dtype, questions, args.rounds) for dtype in dtypes}
    table = Table("questions per second", *found)
    for name in found["float32"]:
        if name not in ("batches", "ours / bare"):
            table.add_row(name, *(f"{row[name]:.0f}" for row in found.values()))
    for name, share in (
        ("ours / one by one", lambda row: row["ours"] / row["one by one"]),
        ("ours / bare, median of the rounds", lambda row: row["ours / bare"]),
        ("alone: padded / unpadded", lambda row: row["alone, padded"] / row["alone, unpadded"]),
    ):
        table.add_row(name, *(f"{share(row):.2f}" for row in found.values()))
    Console().print(table)
    settings = {"n": len(questions), "rounds": args.rounds, "seed": args.seed, "words": _words(questions)}
    machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    print(json.dumps({"benchmark": "encoder", "settings": settings, "rates": found, **machine}))


def _words(questions: Sequence[str]) -> float:
    return round(float(np.mean([len(question.split()) for question in questions])), 1)


if __name__ == "__main__":
    main()
