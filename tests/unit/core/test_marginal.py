"""The paper's formulas in log space, held against the same formulas written out in probabilities."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.core import marginal
from openbook.errors import InvalidRequest


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """scores (n, k), log_likelihood (n, k, t), tokens (n, t): some slots empty, lengths mixed, none empty."""
    n, k, t = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = random.normal(scale=5, size=(n, k))
    empty = np.arange(k) >= random.integers(1, k + 1, size=(n, 1))
    scores[empty] = -np.inf
    log_likelihood = -random.exponential(3.0, size=(n, k, t))
    log_likelihood[empty] = np.nan  # whatever stands there
    tokens = np.arange(t) < random.integers(1, t + 1, size=(n, 1))
    return scores, log_likelihood, tokens


def _written_out(scores: Any, log_likelihood: Any, tokens: Any) -> Any:
    """Per question: prior (k,), sequence marginal, token marginal, posterior (k,), posterior of each token (t, k)."""
    for question in range(len(scores)):
        weights = np.exp(scores[question] - scores[question].max())
        prior = weights / weights.sum()
        length = int(tokens[question].sum())
        real = [z for z in range(len(prior)) if prior[z] > 0]
        p = np.exp(log_likelihood[question][:, :length])
        joint = {z: prior[z] * np.prod(p[z]) for z in real}
        per_token = [sum(prior[z] * p[z, t] for z in real) for t in range(length)]
        posterior = [joint.get(z, 0.0) / sum(joint.values()) for z in range(len(prior))]
        token_posterior = [
            [prior[z] * p[z, t] / per_token[t] if z in joint else 0.0 for z in range(len(prior))] for t in range(length)
        ]
        yield prior, sum(joint.values()), np.prod(per_token), posterior, token_posterior


@given(problems())
@settings(max_examples=60)
def test_log_space_equals_the_formulas_in_probabilities(problem: Any) -> None:
    scores, log_likelihood, tokens = problem
    prior = marginal.log_prior(scores)
    sequence = marginal.sequence_log_marginal(prior, log_likelihood, tokens)
    token = marginal.token_log_marginal(prior, log_likelihood, tokens)
    posterior = marginal.sequence_log_posterior(prior, log_likelihood, tokens)
    token_posterior = marginal.token_log_posterior(prior, log_likelihood)
    each = marginal.next_log_marginal(prior, log_likelihood)
    so_far = np.cumsum(np.nan_to_num(log_likelihood), -1)  # empty slots have a prior of 0
    each_of_sequence = marginal.sequence_next_log_marginal(prior, so_far)
    sequence_posterior = marginal.token_log_posterior(prior, so_far)
    for q, (p, of_sequence, of_token, z_given_y, z_given_yt) in enumerate(_written_out(*problem)):
        np.testing.assert_allclose(np.exp(prior[q]), p, atol=1e-12)
        np.testing.assert_allclose(np.exp(sequence[q]), of_sequence, rtol=1e-9)
        np.testing.assert_allclose(np.exp(token[q]), of_token, rtol=1e-9)
        np.testing.assert_allclose(np.exp(posterior[q]), z_given_y, atol=1e-9)
        np.testing.assert_allclose(np.exp(token_posterior[q][: len(z_given_yt)]), z_given_yt, atol=1e-9)
        length = int(tokens[q].sum())
        np.testing.assert_allclose(each[q][:length].sum(), token[q], rtol=1e-9)
        np.testing.assert_allclose(each_of_sequence[q][:length].sum(), sequence[q], rtol=1e-9)
        np.testing.assert_allclose(np.exp(sequence_posterior[q][length - 1]), z_given_y, atol=1e-9)
        share = np.exp(marginal.answer_log_posterior(token_posterior[q : q + 1], tokens[q : q + 1])[0])
        np.testing.assert_allclose(share, np.mean(z_given_yt, axis=0), atol=1e-9)


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_the_order_of_passages_and_empty_slots_change_nothing(problem: Any, random: Any) -> None:
    scores, log_likelihood, tokens = problem
    order = list(range(scores.shape[1]))
    random.shuffle(order)
    wider = np.pad(scores[:, order], ((0, 0), (0, 2)), constant_values=-np.inf)
    likelihoods = np.pad(log_likelihood[:, order], ((0, 0), (0, 2), (0, 0)), constant_values=np.nan)
    for compute in (marginal.sequence_log_marginal, marginal.token_log_marginal):
        before = compute(marginal.log_prior(scores), log_likelihood, tokens)
        after = compute(marginal.log_prior(wider), likelihoods, tokens)
        np.testing.assert_allclose(after, before, rtol=1e-12)


@given(problems())
@settings(max_examples=30)
def test_both_formulations_agree_on_one_token_and_on_one_passage(problem: Any) -> None:
    scores, log_likelihood, tokens = problem
    prior = marginal.log_prior(scores)
    one = np.ones((len(scores), 1), dtype=bool)
    sequence = marginal.sequence_log_marginal(prior, log_likelihood[..., :1], one)
    np.testing.assert_allclose(sequence, marginal.token_log_marginal(prior, log_likelihood[..., :1], one), rtol=1e-12)
    np.testing.assert_allclose(sequence, marginal.label_log_marginal(prior, log_likelihood)[:, 0], rtol=1e-12)
    alone = marginal.log_prior(scores[:, :1])
    np.testing.assert_allclose(
        marginal.sequence_log_marginal(alone, log_likelihood[:, :1], tokens),
        marginal.token_log_marginal(alone, log_likelihood[:, :1], tokens),
        rtol=1e-12,
    )


def test_an_answer_without_tokens_has_probability_one_and_its_posterior_is_the_prior() -> None:
    prior = marginal.log_prior([[1.0, 3.0]])
    nothing = (np.full((1, 2, 3), -7.0), np.zeros((1, 3), dtype=bool))
    assert marginal.sequence_log_marginal(prior, *nothing) == pytest.approx(0.0)
    assert marginal.token_log_marginal(prior, *nothing) == pytest.approx(0.0)
    np.testing.assert_allclose(marginal.sequence_log_posterior(prior, *nothing), prior)


def test_one_answer_without_tokens_among_others_has_no_posterior() -> None:
    posterior = np.log(np.full((2, 3, 2), 0.5))
    with pytest.raises(InvalidRequest, match="one token or more per answer"):
        marginal.answer_log_posterior(posterior, [[True, False, False], [False] * 3])


def test_probabilities_far_below_the_smallest_float_are_kept_apart() -> None:
    prior = marginal.log_prior([[0.0, -5000.0]])
    likelihood = np.array([[[-9000.0], [-1.0]]])
    assert marginal.sequence_log_marginal(prior, likelihood, np.ones((1, 1))) == pytest.approx(-5001.0)


@pytest.mark.parametrize("scores", [[[]], [[-np.inf, -np.inf]], [[np.nan, 1.0]], [[np.inf, 1.0]]])
def test_scores_that_give_no_prior_are_refused(scores: Any) -> None:
    with pytest.raises(InvalidRequest, match="scores must be finite"):
        marginal.log_prior(scores)
