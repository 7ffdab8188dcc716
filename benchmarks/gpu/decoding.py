"""Decoding beside transformers': the contestants of bench_decode.py."""

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from bench_decode import theirs
from rag_side_by_side import EOS, PAD, Batch, rag

from gpu.part import LIMITS, OUT_OF_MEMORY, Part, off
from openbook.core.types import Formulation, GenerationSettings
from openbook.models.decoding import Decoded, Seq2Seq, generate

QUESTIONS = {Formulation.TOKEN: 8, Formulation.SEQUENCE: 2}
"""In a batch, which RAG-Sequence of transformers takes one by one."""


def run(part: Part) -> None:
    """Few passages first: what there is no time for is the slowest."""
    part.columns = ("formulation", "beams", "passages", "questions", "dtype")
    part.columns += ("transformers s a question", "ours", "times", "transformers GB", "ours", "equal answers")
    exact = copy.deepcopy(part.generator).to(part.device)
    models = {"float32": exact, "bfloat16": copy.deepcopy(exact).bfloat16()}
    equal: list[bool] = []  # answers in float32
    for k in part.sizes.decoded_passages:
        for formulation in Formulation:
            for n_beams in (1, 4):
                settings = GenerationSettings(
                    formulation=formulation, n_beams=n_beams, max_new_tokens=part.sizes.new_tokens, min_new_tokens=2
                )
                for dtype, model in models.items():
                    if part.has_time_for(f"{formulation}, {n_beams} beams, {k} passages, {dtype}"):
                        found = one(part, settings, k, dtype, model, exact)
                        equal += found if model is exact else []
    few = "between two answers whose difference is rounding, either may be found; in bfloat16 that is often so"
    differ = 1 - sum(equal) / len(equal) if equal else math.nan
    part.check("float32, share of answers other than transformers'", differ, 0.1, few)


@torch.no_grad()
def one(part: Part, settings: GenerationSettings, k: int, dtype: str, model: Any, exact: Any) -> list[bool]:
    """Which answers are equal. Our log p(y|x) must be what transformers' forward pass in float32 says of them."""
    n = min(QUESTIONS[settings.formulation], part.sizes.questions)
    batch = Batch.random(replace(part.sizes, questions=n, passages=k)).to(part.device)
    reader, oracle = Seq2Seq(model), rag(model, settings.formulation, k)
    ours = part.measured(lambda: generate(reader, batch.ids, batch.mask, batch.scores, settings))
    other = part.measured(lambda: theirs(oracle, batch.ids, batch.mask, batch.scores, settings))
    case = str(settings.formulation), settings.n_beams, k, n, dtype
    seconds = [found and found.seconds / n for found in (other, ours)]
    memory = [found.peak_gb if found else OUT_OF_MEMORY for found in (other, ours)]
    times = seconds[0] / seconds[1] if all(seconds) else None
    equal: list[bool] = []
    if ours and other:
        equal = [list(answer.token_ids) == tokens for answer, tokens in zip(ours.result, other.result, strict=True)]
    part.row(*case, *seconds, times, *memory, f"{sum(equal)} of {n}" if equal else None)
    if ours:
        found = [answer.log_likelihood for answer in ours.result]
        wanted = log_p(rag(exact, settings.formulation, k), batch, ours.result)
        what = f"{settings.formulation}, {settings.n_beams} beams, {k} passages, {dtype}"
        part.check(f"{what}: log p(y|x) beside transformers' float32", off(found, wanted), *LIMITS[dtype])
    return equal


def log_p(oracle: Any, batch: Batch, answers: list[Decoded]) -> list[float]:
    """Of each answer, by transformers' forward pass."""
    longest = max(len(answer.token_ids) for answer in answers)
    rows = [[EOS, *answer.token_ids, *[PAD] * (longest - len(answer.token_ids))] for answer in answers]
    inputs = {"context_input_ids": batch.ids, "context_attention_mask": batch.mask, "doc_scores": batch.scores}
    losses = oracle(**inputs, labels=torch.tensor(rows, device=batch.ids.device), reduce_loss=False).loss
    return (-losses).flatten().tolist()
