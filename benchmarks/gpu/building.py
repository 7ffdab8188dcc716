"""Passages encoded as `openbook build` does, by several processes, beside bare forward passes over perfect batches."""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import tiny_encoders
import torch

from gpu.embeddings import POOLINGS, model, texts
from gpu.part import Part
from openbook.config import EncoderSettings
from openbook.core.types import Passage
from openbook.corpus import encode
from openbook.index.disk.arrays import new_array
from openbook.index.disk.store import write_passages
from openbook.models.encoder import TextEncoder, embed, passage_ids
from openbook.models.formats import pad
from openbook.models.packing import GPU_BATCH_TOKENS

COMPARED, DIFFERENT = 256, 1 << 14
"""Passages whose vectors are compared, and those that all the others repeat."""


def run(part: Part) -> None:
    """Both shapes in bfloat16."""
    part.columns = ("shape", "processes", "passages", "seconds", "passages a second", "bare", "share of bare")
    tokenizer = tiny_encoders.bert_tokenizer([*tiny_encoders.BERT[:5], *(f"w{i}" for i in range(part.sizes.different))])
    different = texts(part.sizes, min(DIFFERENT, part.sizes.built))
    passages = [replace(different[i % len(different)], id=i) for i in range(part.sizes.built)]
    for shape in POOLINGS:
        if part.has_time_for(shape):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                tiny_encoders.saved(folder / "encoder", model(shape, part, len(tokenizer)), tokenizer)
                row(part, shape, folder, passages)


def row(part: Part, shape: str, folder: Path, passages: list[Passage]) -> None:
    """One shape, its model in the folder."""
    settings = EncoderSettings(
        model=str(folder / "encoder"), device=part.device.type, dtype="bfloat16", n_threads=os.cpu_count() or 1
    )
    encoder = TextEncoder.load(encode.alone(settings), "passage")
    n, at_once = len(passages), part.sizes.step
    write_passages(folder, passages)
    encode.plan_rows(folder, np.zeros(n, np.bool_), at_once)
    vectors = new_array(folder / encode.VECTORS, np.float32, (n, encoder.dimension))
    steps = [range(i, min(i + at_once, n)) for i in range(0, n, at_once)]
    clock = Clock(max(1, min(len(encode.everyone(settings)), n // encode.GPU_ROWS_PER_PROCESS)), len(steps))
    begun = time.perf_counter()
    encode.encode(folder, steps, settings, encoder, clock.written, clock.wait)
    seconds = time.perf_counter() - begun
    some = np.linspace(0, n - 1, min(COMPARED, n)).astype(int).tolist()
    alone = encoder.encode_passages([passages[i] for i in some])
    differ = sum(a.tobytes() != b.tobytes() for a, b in zip(vectors[some], alone, strict=True))
    part.check(f"{shape}, vectors with other bits than alone", differ, 0, "a passage has the same bits in any company")
    rate, least = clock.rate() or n / seconds, bare(part, encoder, passages)
    part.row(shape, clock.n_processes, n, seconds, rate, least, rate / least if least else None)


class Clock:
    """When each process has written what: their threads tell of it."""

    def __init__(self, n_processes: int, n_steps: int) -> None:
        self.n_processes, self._n_steps = n_processes, n_steps
        self._written: dict[int, list[tuple[float, int]]] = {}
        self._others_at_work = threading.Event()

    def written(self, step: range) -> None:
        """One step."""
        mine = self._written.setdefault(threading.get_ident(), [])
        mine.append((time.perf_counter(), len(step)))
        all_done = sum(map(len, self._written.values())) == self._n_steps  # some began too late for any
        if len(self._written) >= self.n_processes - 1 or all_done:
            self._others_at_work.set()

    def wait(self, check: Callable[[], None]) -> None:
        """Until all others are at work."""
        while self.n_processes > 1 and not self._others_at_work.wait(0.1):
            check()

    def rate(self) -> float:
        """Passages a second of all together, while all were at work; 0: too few to tell."""
        if len(self._written) < self.n_processes:
            return 0.0
        first = max(times[0][0] for times in self._written.values())
        last = min(times[-1][0] for times in self._written.values())
        total = 0.0
        for times in self._written.values():
            here = [(at, n) for at, n in times if first <= at <= last]
            if len(here) > 1:
                total += sum(n for _, n in here[1:]) / (here[-1][0] - here[0][0])
        return total


def bare(part: Part, encoder: TextEncoder, passages: list[Passage]) -> float | None:
    """Passages a second: sorted by length, padded to the longest of each batch, as many tokens at once as ours."""
    ids = sorted(passage_ids(encoder._tokenizer, encoder.pooling, passages[:DIFFERENT]), key=len)
    batches, first = [], 0
    while first < len(ids):
        at_once = max(1, GPU_BATCH_TOKENS // len(ids[min(first + 100, len(ids) - 1)]))
        batch = pad(ids[first : first + at_once], encoder._tokenizer.pad_token_id)
        batches.append([tensor.to(part.device) for tensor in batch])
        first += at_once

    @torch.inference_mode()
    def forward() -> None:
        for tokens, mask in batches:
            embed(encoder._model, encoder.pooling, tokens, mask)

    forward()  # every shape is new: this takes seconds
    found = part.measured(forward)
    return None if found is None else len(ids) / found.seconds
