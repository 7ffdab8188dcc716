"""On a pretended GPU: everything moves there that must, and nothing else changes."""

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import tiny_encoders
import tiny_models as tiny
import torch
from pretended import gpu
from torch import Tensor

from openbook.config import Dtype, ModelSettings
from openbook.core.types import Decoding, Formulation, GenerationSettings, Passage
from openbook.models import checkpoint as checkpoint_module
from openbook.models import marginal
from openbook.models.checkpoint import devices_of, place
from openbook.models.decoding import Decoded, generate_several, score_answers, stream
from openbook.models.encoder import EncoderCheckpoint, TextEncoder
from openbook.models.pooling import Pooling
from openbook.models.seq2seq import Seq2Seq

N, K = 3, 4
# A generator, and whether contexts and scores are there already.
CASES = [(tiny.bart, False), (tiny.bart, True), (tiny.t5, False), (tiny.bert2bert, True)]
WAYS = [
    *(GenerationSettings(Formulation.TOKEN, n_beams=n_beams, max_new_tokens=6) for n_beams in (1, 3)),
    *(GenerationSettings(Formulation.SEQUENCE, each, n, 6) for each, n in product(Decoding, (1, 3))),
    *(GenerationSettings(each, max_new_tokens=6, temperature=0.9, top_p=0.8) for each in Formulation),
    GenerationSettings(Formulation.TOKEN, n_beams=2, max_new_tokens=6, min_new_tokens=3, early_stopping=True),
]


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    with gpu() as there:
        yield there


def asked() -> tuple[Tensor, Tensor, Tensor]:
    """Contexts and scores, two slots of them empty."""
    scores = tiny.scores(3, N, K)
    scores[1, 2:] = -torch.inf
    return *tiny.contexts(3, N * K), scores


def moved(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(tensor.to(device) for tensor in tensors)


def test_what_was_not_moved_is_refused(device: torch.device) -> None:
    there = torch.arange(3, device=device)
    assert (there.device, (there + 1).tolist()) == (device, [1, 2, 3])
    for together in (
        lambda: there + torch.arange(3),
        lambda: torch.arange(3)[there],
        lambda: torch.cat([there] * 2 + [torch.ones(1)]),
    ):
        with pytest.raises(RuntimeError, match="expected all tensors on"):
            together()


@pytest.mark.parametrize(("build", "inputs_there"), CASES)
def test_answers_are_those_of_the_cpu(device: torch.device, build: Any, inputs_there: bool) -> None:
    model, inputs = build(), asked()
    there = Seq2Seq(copy.deepcopy(model).to(device))
    given = moved(inputs, device) if inputs_there else inputs
    for way in WAYS:
        for found, wanted in zip(
            generate_several(there, *given, way, 2), generate_several(model, *inputs, way, 2), strict=True
        ):
            same(found, wanted)


def same(found: list[Decoded], wanted: list[Decoded]) -> None:
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.log_likelihood, other.log_likelihood, rtol=1e-12)
        np.testing.assert_allclose(one.log_posterior, other.log_posterior, rtol=1e-9)


@pytest.mark.parametrize("build", [tiny.bart, tiny.bert2bert])
def test_given_answers_and_streams_are_those_of_the_cpu(device: torch.device, build: Any) -> None:
    model, inputs = build(), asked()
    there = Seq2Seq(copy.deepcopy(model).to(device))
    for formulation in Formulation:
        answers = [[7, 8, tiny.EOS], [7, 9, 10, tiny.EOS], [11]]
        pairs = (score_answers(each, *inputs, answers, formulation) for each in (there, model))
        for found, wanted in zip(*pairs, strict=True):
            same(found, wanted)
    one = inputs[0][:K], inputs[1][:K], inputs[2][0]
    for way in (WAYS[0], WAYS[-2]):
        found, wanted = (list(stream(each, *one, way)) for each in (there, model))
        assert [getattr(item, "token_id", None) for item in found] == [
            getattr(item, "token_id", None) for item in wanted
        ]


@pytest.mark.parametrize(("build", "inputs_there"), CASES)
@pytest.mark.parametrize("formulation", Formulation)
def test_losses_and_gradients_are_those_of_the_cpu(
    device: torch.device, build: Any, inputs_there: bool, formulation: Formulation
) -> None:
    labels = torch.tensor([[7, 8, tiny.EOS], [9, tiny.EOS, marginal.IGNORED], [10, 11, 12]])
    results = []
    for where in (torch.device("cpu"), device):
        model, at_hand = build().to(where), where if inputs_there else torch.device("cpu")
        given = moved(asked(), at_hand)
        given[2].requires_grad_()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        reader = Seq2Seq(model, adds_gradients=True)
        smoothed = marginal.loss(reader, *given, labels.to(at_hand), formulation, label_smoothing=0.1)
        classes = marginal.label_log_likelihood(reader, *given, [[7], [8, 9]], formulation)
        (smoothed.sum() + classes.sum()).backward()
        gradients = [given[2].grad, *(parameter.grad for parameter in model.parameters())]
        results.append([smoothed.detach(), classes.detach(), *gradients])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["pooler", "cls", "mean"])
def test_vectors_are_those_of_the_cpu(device: torch.device, mode: Any) -> None:
    pooling = Pooling(mode, mode != "pooler", max_tokens=40, titles="pair", query_scale=2.0)
    tokenizer = tiny_encoders.bert_tokenizer()
    passages = [Passage(i, "", "marie curie", "born in warsaw " * i) for i in range(5)]
    vectors = []
    for name in ("cpu", str(device)):
        checkpoint = EncoderCheckpoint(tiny_encoders.bert_model(), tokenizer, pooling)
        encoder = TextEncoder(checkpoint, ModelSettings(device=name))
        vectors.append(np.concatenate([encoder.encode_passages(passages), encoder.encode_questions(["who", "when ?"])]))
    np.testing.assert_allclose(*vectors, rtol=1e-5, atol=1e-7)  # in batches of another shape


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_on_a_gpu_auto_takes_bfloat16_since_it_is_multiplied_there(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert checkpoint_module._dtype("auto", "cuda:0") == dtype


def test_auto_and_cuda_stand_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    both = ["cuda:0", "cuda:1"]
    assert [devices_of(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == [both, both, ["cuda:1"], ["cpu"]]


@pytest.mark.parametrize("native", [False, True])
def test_auto_takes_bfloat16_where_the_processor_has_it_and_whoever_wants_it_elsewhere_is_warned(
    native: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": native})

    def placed(dtype: Dtype) -> torch.dtype:
        found: torch.dtype = place(torch.nn.Linear(1, 1), ModelSettings(dtype=dtype, device="cpu")).weight.dtype
        return found

    assert placed("auto") == (torch.bfloat16 if native else torch.float32)
    assert not caplog.messages
    assert placed("bfloat16") == torch.bfloat16
    warning = "bfloat16 is many times slower than float32 on this processor: dtype auto takes the faster one"
    assert caplog.messages == ([] if native else [warning])
