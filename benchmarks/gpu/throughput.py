"""The generator's questions per second against how many are asked at once."""

import copy
from dataclasses import replace

import torch
from rag_side_by_side import Batch

from gpu.part import LIMITS, OUT_OF_MEMORY, Part, off
from openbook.core.types import Formulation, GenerationSettings
from openbook.models.decoding import Seq2Seq, generate, score_answers

K = 5
"""Passages, as by default."""


def run(part: Part) -> None:
    """Four beams, all questions of a batch at once, whatever memory that takes."""
    part.columns = ("formulation", "dtype", "questions at once", "questions a second", "GB")
    for dtype in ("bfloat16", "float32"):
        reader = Seq2Seq(copy.deepcopy(part.generator).to(part.device, getattr(torch, dtype)))
        for formulation in Formulation:
            settings = GenerationSettings(formulation=formulation, max_new_tokens=part.sizes.new_tokens)
            for n in part.sizes.batches:
                if part.has_time_for(f"{formulation}, {dtype}, {n} at once"):
                    row(part, reader, settings, dtype, n)


def row(part: Part, reader: Seq2Seq, settings: GenerationSettings, dtype: str, n: int) -> None:
    """And whether the first answer's numbers are those that it has alone."""
    batch = Batch.random(replace(part.sizes, questions=n, passages=K)).to(part.device)
    inputs = batch.ids, batch.mask, batch.scores
    found = part.measured(lambda: generate(reader, *inputs, settings), repeats=1)
    if found is None:
        part.row(settings.formulation, dtype, n, None, OUT_OF_MEMORY)
        return
    part.row(settings.formulation, dtype, n, n / found.seconds, found.peak_gb)
    first = found.result[0]
    alone = batch.ids[:K], batch.mask[:K], batch.scores[:1]
    [[again]] = score_answers(reader, *alone, [first.token_ids], settings.formulation)
    what = f"{settings.formulation}, {dtype}, {n} at once: log p(y|x) of the first, beside read again alone"
    part.check(what, off([first.log_likelihood], [again.log_likelihood]), *LIMITS[dtype])
