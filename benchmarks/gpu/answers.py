"""The questions of `make identity`, in float64, on the GPU, on the CPU, and of transformers on the GPU."""

import time

import numpy as np
from identity import BATCH, ROUNDING, verdicts

from gpu.part import Part


def run(part: Part) -> None:
    """Answers must be the same ones, for in float64 rounding decides nothing."""
    part.columns = ("questions", "distinct answers", "with transformers, alone and on the CPU, s a question")
    n, begun = part.sizes.asked, time.perf_counter()
    differ = {"other than transformers'": 0, "other when asked alone": 0, "other than on the CPU": 0}
    answers, gap, asked = set(), 0.0, 0
    for here, there in zip(verdicts(n, str(part.device)), verdicts(n), strict=True):
        answers.add(here.ours.token_ids)
        differ["other than transformers'"] += not here.agrees
        differ["other when asked alone"] += not here.stable
        differ["other than on the CPU"] += here.ours.token_ids != there.ours.token_ids
        numbers = [(v.ours.log_likelihood, *np.exp(v.ours.log_posterior)) for v in (here, there)]
        gap = max(gap, *np.abs(np.subtract(*numbers)))
        asked += 1
        if asked < n and asked % BATCH == 0 and not part.has_time_for(f"{n - asked} of {n} questions"):
            break
    part.row(asked, len(answers), (time.perf_counter() - begun) / asked)
    for how, count in differ.items():
        part.check(f"answers {how}", count, 0, "in float64 rounding decides nothing")
    why = "float64 rounds tens of nats to 1e-14, and an answer has some hundred sums"
    part.check("log p(y|x) and p(z|x,y), GPU beside CPU, absolute", gap, ROUNDING, why)
