"""Losses: values beside the NumPy file, gradients beside finite differences, both beside transformers."""

from typing import Any

import numpy as np
import pytest
import tiny_models as tiny
import torch
from torch import Tensor
from transformers import RagSequenceForGeneration, RagTokenForGeneration

from openbook.core import marginal as paper
from openbook.core.types import Formulation
from openbook.errors import InvalidRequest
from openbook.models import marginal
from openbook.models.seq2seq import Seq2Seq, SpecialTokens


def _labels(seed: int, n: int, t: int, shortest: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, tiny.VOCABULARY, (n, t), generator=random)
    lengths = torch.randint(shortest, t + 1, (n, 1), generator=random)
    return labels.masked_fill(torch.arange(t) >= lengths, marginal.IGNORED)


def _likelihoods(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
    """(n, k, t), the plain way: one row at a time through the model's own forward."""
    k, rows = len(ids) // len(labels), []
    for row, (row_ids, row_mask) in enumerate(zip(ids, mask, strict=True)):
        target = labels[row // k].clamp(min=0)
        inputs = torch.cat([torch.tensor([tiny.EOS]), target[:-1]])
        length = int(row_mask.sum())
        with torch.no_grad():
            logits = model(input_ids=row_ids[None, :length], decoder_input_ids=inputs[None]).logits[0]
        rows.append(logits.log_softmax(-1).gather(-1, target[:, None])[:, 0].numpy())
    return np.stack(rows).reshape(len(labels), k, -1)


NUMPY = {Formulation.SEQUENCE: paper.sequence_log_marginal, Formulation.TOKEN: paper.token_log_marginal}


@pytest.mark.parametrize("build", [tiny.bart, tiny.t5, tiny.bert2bert])
@pytest.mark.parametrize("formulation", Formulation)
def test_values_are_those_of_the_numpy_file(build: Any, formulation: Formulation) -> None:
    model, n, k = build(), 5, 3
    ids, mask = tiny.contexts(1, n * k)
    scores, labels = tiny.scores(1, n, k), _labels(1, n, 6)
    ours = marginal.log_likelihood(model, ids, mask, scores, labels, formulation)
    likelihoods = _likelihoods(model, ids, mask, labels)
    tokens = (labels != marginal.IGNORED).numpy()
    theirs = NUMPY[formulation](paper.log_prior(scores.numpy()), likelihoods, tokens)
    np.testing.assert_allclose(ours.detach().numpy(), theirs, atol=1e-12)


@pytest.mark.parametrize("formulation", Formulation)
def test_gradients_agree_with_finite_differences(formulation: Formulation) -> None:
    model = tiny.bart()
    ids, mask = tiny.contexts(2, 6)
    labels = _labels(2, 2, 4)
    scores = tiny.scores(2, 2, 3).requires_grad_()
    weights = [model.model.decoder.layers[0].encoder_attn.k_proj.bias, model.model.encoder.layers[0].fc1.bias]
    weights.append(model.model.decoder.layers[1].fc2.bias)

    def loss(scores: Tensor, *changed: Tensor) -> Tensor:
        with torch.no_grad():
            for weight, value in zip(weights, changed, strict=True):
                weight.copy_(value)
        return -marginal.log_likelihood(model, ids, mask, scores, labels, formulation).sum()

    start = [weight.detach().clone() for weight in weights]
    loss(scores, *start).backward()
    step = 1e-6
    for index, tensor in enumerate((scores, *weights)):
        assert tensor.grad is not None
        flat = tensor.grad.flatten()
        for element in range(0, flat.numel(), max(1, flat.numel() // 6)):
            values = [scores.detach().clone(), *(value.clone() for value in start)]
            values[index].view(-1)[element] += step
            up = loss(*values).item()
            values[index].view(-1)[element] -= 2 * step
            down = loss(*values).item()
            assert flat[element].item() == pytest.approx((up - down) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("formulation", Formulation)
def test_losses_and_gradients_agree_with_transformers(formulation: Formulation) -> None:
    """Where it is right: no -100, two target tokens or more, every slot filled."""
    model = tiny.bart()
    kind = RagSequenceForGeneration if formulation is Formulation.SEQUENCE else RagTokenForGeneration
    for case in range(40):
        n, k = 1 + case % 3, 1 + case % 10
        oracle = tiny.rag(kind, model, k)
        ids, mask = tiny.contexts(case, n * k)
        labels = _labels(case, n, 5, shortest=2)
        scores = tiny.scores(case, n, k).requires_grad_()
        with_start = torch.cat([torch.full((n, 1), tiny.EOS), labels.masked_fill(labels < 0, tiny.PAD)], 1)
        theirs = oracle(context_input_ids=ids, context_attention_mask=mask, doc_scores=scores, labels=with_start)
        ours = marginal.log_likelihood(model, ids, mask, scores, labels, formulation)
        torch.testing.assert_close(ours, -theirs.loss.flatten(), atol=1e-10, rtol=0)
        inputs = (scores, model.model.shared.weight, model.model.encoder.layers[1].fc1.weight)
        wanted = torch.autograd.grad(-theirs.loss.sum(), inputs)
        got = torch.autograd.grad(ours.sum(), inputs)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("formulation", Formulation)
def test_empty_slots_influence_neither_value_nor_gradient(formulation: Formulation) -> None:
    model = tiny.bart()
    ids, mask = tiny.contexts(3, 4)
    scores, labels = tiny.scores(3, 2, 2), _labels(3, 2, 4)
    wide_ids, wide_mask = torch.full((2, 3, 12), 7), torch.zeros((2, 3, 12), dtype=torch.long)
    wide_ids[:, :2], wide_mask[:, :2] = ids.view(2, 2, -1), mask.view(2, 2, -1)
    wide = torch.cat([scores, torch.full((2, 1), -torch.inf)], 1).requires_grad_()
    narrow = scores.clone().requires_grad_()
    a = marginal.log_likelihood(model, ids, mask, narrow, labels, formulation)
    b = marginal.log_likelihood(model, wide_ids.flatten(0, 1), wide_mask.flatten(0, 1), wide, labels, formulation)
    torch.testing.assert_close(a, b)
    (of_narrow,), (of_wide,) = torch.autograd.grad(a.sum(), narrow), torch.autograd.grad(b.sum(), wide)
    torch.testing.assert_close(of_wide, torch.nn.functional.pad(of_narrow, (0, 1)))


@pytest.mark.parametrize("formulation", Formulation)
def test_an_answer_of_one_token_keeps_its_prior(formulation: Formulation) -> None:
    """transformers adds the prior to the second target token, so here it adds none."""
    model = tiny.bart()
    ids, mask = tiny.contexts(4, 3)
    labels, scores = torch.tensor([[tiny.EOS, -100]]), tiny.scores(4, 1, 3)
    got = marginal.log_likelihood(model, ids, mask, scores, labels, formulation).item()
    likelihoods = _likelihoods(model, ids, mask, labels)[0, :, 0]
    assert got == pytest.approx(np.logaddexp.reduce(paper.log_prior(scores.numpy())[0] + likelihoods))
    assert got != pytest.approx(np.logaddexp.reduce(likelihoods))


@pytest.mark.parametrize("formulation", Formulation)
def test_an_answer_without_tokens_has_probability_one(formulation: Formulation) -> None:
    """transformers crashes on -100."""
    ids, mask = tiny.contexts(4, 3)
    scores = tiny.scores(4, 1, 3).requires_grad_()
    got = marginal.log_likelihood(tiny.bart(), ids, mask, scores, torch.full((1, 2), -100), formulation)
    got.sum().backward()
    torch.testing.assert_close(got.detach(), torch.zeros(1, dtype=torch.float64))
    assert torch.isfinite(scores.grad).all()


@pytest.mark.parametrize("forced_bos", [None, tiny.BOS])
def test_labels_of_one_token_have_the_same_probability_under_both_formulations(forced_bos: int | None) -> None:
    model, labels = tiny.bart(), torch.tensor([11, 12, 13])
    ids, mask = tiny.contexts(10, 6)
    scores = tiny.scores(10, 2, 3)
    scores[1, 2] = -torch.inf
    special = SpecialTokens(tiny.EOS, (tiny.EOS,), tiny.PAD, forced_bos)
    got = marginal.label_log_likelihood(model, ids, mask, scores, labels, special)
    for c, label in enumerate(labels):
        if forced_bos is None:
            for formulation in Formulation:
                answer = torch.full((2, 1), int(label))
                wanted = marginal.log_likelihood(model, ids, mask, scores, answer, formulation, special)
                torch.testing.assert_close(got[:, c], wanted)
        else:
            inputs = torch.tensor([[tiny.EOS, forced_bos]]).expand(6, -1)
            with torch.no_grad():
                logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=inputs).logits[:, -1]
            likelihood = logits.log_softmax(-1)[:, label].view(2, 3, 1).numpy()
            wanted = paper.label_log_marginal(paper.log_prior(scores.numpy()), likelihood)[:, 0]
            np.testing.assert_allclose(got[:, c].detach().numpy(), wanted)


def test_the_vocabulary_is_projected_in_slices_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.bart()
    ids, mask = tiny.contexts(5, 4)
    scores, labels = tiny.scores(5, 2, 2), _labels(5, 2, 6, shortest=4)
    weight = model.model.shared.weight
    results = []
    for size in (1 << 24, 3 * tiny.VOCABULARY):
        monkeypatch.setattr("openbook.models.vocabulary._MAX_LOGITS", size)
        value = marginal.log_likelihood(model, ids, mask, scores, labels, Formulation.TOKEN).sum()
        results.append((value.detach(), torch.autograd.grad(value, weight)[0]))
    torch.testing.assert_close(results[0], results[1])


def test_bfloat16_weights_give_float32_log_probabilities() -> None:
    model = tiny.bart().bfloat16()
    ids, mask = tiny.contexts(6, 2)
    got = marginal.log_likelihood(model, ids, mask, torch.zeros(1, 2).bfloat16(), _labels(6, 1, 4), Formulation.TOKEN)
    assert got.dtype == torch.float32


def test_the_mode_of_the_model_is_kept_and_the_model_left_as_it_was() -> None:
    model = tiny.bart().train()
    ids, mask = tiny.contexts(7, 2)
    arguments = (ids, mask, torch.zeros(1, 2), _labels(7, 1, 4, shortest=4), Formulation.SEQUENCE)
    with_dropout = {round(marginal.log_likelihood(model, *arguments).item(), 9) for _ in range(3)}
    assert len(with_dropout) == 3
    assert len({round(marginal.log_likelihood(Seq2Seq(model), *arguments).item(), 9) for _ in range(3)}) == 1
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_shapes_that_do_not_fit_are_refused() -> None:
    ids, mask = tiny.contexts(8, 4)
    with pytest.raises(InvalidRequest, match=r"labels \(n, t\), got .*\(3, 2\)"):
        marginal.log_likelihood(tiny.bart(), ids, mask, torch.zeros(2, 2), torch.zeros(3, 2), Formulation.TOKEN)
