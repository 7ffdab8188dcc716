"""Samples are drawn from the distributions of the paper, which on a tiny model can be written out."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny
import torch

from openbook.core.types import Formulation, GenerationSettings
from openbook.errors import InvalidRequest
from openbook.models import marginal
from openbook.models.decoding import Decoded, DecodedToken, Seq2Seq, generate, generate_several, stream

N = 4000
SAMPLED = GenerationSettings(max_new_tokens=2, temperature=1.0)
BOTH = pytest.mark.parametrize("formulation", list(Formulation))


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny.bart()
    model.final_logits_bias[0, 12:] = -6.0  # few tokens matter, so that a few thousand samples say something
    return model


def _question(seed: int = 1, k: int = 3) -> tuple[Any, Any, Any]:
    return (*tiny.contexts(seed, k), tiny.scores(seed, 1, k))


def _exact(model: Any, formulation: Formulation) -> dict[tuple[int, ...], float]:
    """p(y|x) of every answer of up to two tokens."""
    short = [(tiny.EOS,)]
    answers = short + [y for y in product(range(tiny.VOCABULARY), repeat=2) if y[:1] not in short]
    ids, mask, scores = _question()
    n = len(answers)
    labels = torch.tensor([(*y, marginal.IGNORED)[:2] for y in answers])
    with torch.no_grad():
        log_p = marginal.log_likelihood(
            Seq2Seq(model), ids.repeat(n, 1), mask.repeat(n, 1), scores.repeat(n, 1), labels, formulation
        )
    return dict(zip(answers, log_p.exp().tolist(), strict=True))


@BOTH
def test_samples_have_the_probabilities_of_the_model(model: Any, formulation: Formulation) -> None:
    exact = _exact(model, formulation)
    assert sum(exact.values()) == pytest.approx(1.0)
    [samples] = generate_several(model, *_question(), replace(SAMPLED, formulation=formulation), N)
    assert len(samples) == N
    seen = Counter(sample.token_ids for sample in samples)
    likely = [y for y, p in exact.items() if N * p > 10]
    expected = np.array([N * exact[y] for y in likely])
    chi_square = sum((np.array([seen[y] for y in likely]) - expected) ** 2 / expected)
    assert len(likely) > 10
    assert chi_square < len(likely) + 5 * np.sqrt(2 * len(likely))  # five standard deviations
    for sample in samples[:50]:
        assert sample.log_likelihood == pytest.approx(np.log(exact[sample.token_ids]), abs=1e-9)


@BOTH
@pytest.mark.parametrize("temperature", [1e-4, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_low_temperature_is_greedy(formulation: Formulation, temperature: float, dtype: torch.dtype) -> None:
    settings = GenerationSettings(formulation=formulation, n_beams=1, max_new_tokens=5, min_new_tokens=2)
    inputs = _question(k=1)  # of several passages RAG-Sequence would draw one
    model = tiny.bart().to(dtype)
    greedy = generate(model, *inputs, settings)[0]
    [samples] = generate_several(model, *inputs, replace(settings, temperature=temperature), 5)
    assert {sample.token_ids for sample in samples} == {greedy.token_ids}


@BOTH
def test_top_p_leaves_out_the_tail(model: Any, formulation: Formulation) -> None:
    """The first token comes from the fewest tokens that hold top_p together, under one passage both alike."""
    inputs = _question(k=1)
    settings = GenerationSettings(formulation=formulation, max_new_tokens=1, temperature=1.0, top_p=0.6)
    with torch.no_grad():
        labels = [[token] for token in range(tiny.VOCABULARY)]
        p = marginal.label_log_likelihood(Seq2Seq(model), *inputs, labels, formulation)[0].exp()
    order = p.argsort(descending=True)
    kept = order[: int((p[order].cumsum(0) < 0.6).sum()) + 1].tolist()
    [samples] = generate_several(model, *inputs, settings, 500)
    assert {sample.token_ids[0] for sample in samples} == set(kept)
    assert 1 < len(kept) < 12
    [only] = {y.token_ids for y in generate_several(model, *inputs, replace(settings, top_p=1e-6), 20)[0]}
    assert only == (kept[0],)


@BOTH
def test_a_seed_gives_the_same_answers_however_many_and_beside_whatever(model: Any, formulation: Formulation) -> None:
    settings = replace(SAMPLED, formulation=formulation, max_new_tokens=6, seed=5)
    ids, mask = tiny.contexts(3, 12)
    scores = tiny.scores(3, 4, 3)
    together = generate_several(model, ids, mask, scores, settings, 6)
    for question, answers in enumerate(together):
        rows = slice(3 * question, 3 * question + 3)
        [alone] = generate_several(model, ids[rows], mask[rows], scores[question][None], settings, 3)
        for got, wanted in zip(alone, answers[:3], strict=True):
            assert got.token_ids == wanted.token_ids
            assert got.log_likelihood == pytest.approx(wanted.log_likelihood, abs=1e-9)
    others = generate_several(model, ids, mask, scores, replace(settings, seed=6), 6)
    assert [y.token_ids for y in others[0]] != [y.token_ids for y in together[0]]


def test_sampled_rag_token_streams(model: Any) -> None:
    settings = replace(SAMPLED, formulation=Formulation.TOKEN, max_new_tokens=6, n_beams=4)
    ids, mask, scores = _question()
    *tokens, whole = stream(model, ids, mask, scores[0], settings)
    assert isinstance(whole, Decoded)
    assert whole.token_ids == tuple(token.token_id for token in tokens if isinstance(token, DecodedToken))
    assert whole.token_ids == generate(model, ids, mask, scores, settings)[0].token_ids


def test_an_empty_slot_is_never_drawn(model: Any) -> None:
    ids, mask, scores = _question()
    scores[0, 1] = -torch.inf
    [samples] = generate_several(model, ids, mask, scores, SAMPLED, 200)
    rest = torch.tensor([0, 2])
    [wanted] = generate_several(model, ids[rest], mask[rest], scores[:, rest], SAMPLED, 200)
    assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in wanted]


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [
        ("temperature", -0.1, "0.0..10.0"),
        ("top_p", 0.0, "1e-06..1.0"),
        ("top_p", 1.1, "1e-06..1.0"),
        ("seed", -1, "0.."),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: float, limits: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} must be {limits}.*got {value}"):
        GenerationSettings(**{field: value})  # type: ignore[arg-type]
