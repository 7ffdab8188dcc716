"""The loss of a run: beside transformers' RAG classes, beside finite differences, and whatever must not change it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tiny_training as tiny
import torch
from pretended import gpu
from torch import Tensor
from transformers import RagConfig, RagSequenceForGeneration, RagTokenForGeneration

from openbook.core.topk import canonical_scores, top_k
from openbook.core.types import NO_HIT, Float32, Formulation, Passage
from openbook.errors import InvalidRequest
from openbook.models import marginal
from openbook.models.marginal import IGNORED
from openbook.training.data import Example
from openbook.training.loop import TrainingDiverged
from openbook.training.loss import PORTIONS, RagLoss
from openbook.training.retrieval import EMPTY, Found, Given, Nothing

KINDS = {Formulation.SEQUENCE: RagSequenceForGeneration, Formulation.TOKEN: RagTokenForGeneration}
PASSAGES, VECTORS = tiny.passages(9), tiny.vectors(9)


class Exact:
    """The passages above, without a snapshot. Scores can be taken from elsewhere, as BM25's are."""

    identity: ClassVar[dict[str, str]] = {}

    def __init__(self, n_passages: int = 9, with_vectors: bool = True) -> None:
        self._vectors, self._with_vectors = VECTORS[:n_passages], with_vectors

    def find(self, examples: Sequence[Example], queries: Float32 | None, k: int) -> Found:
        if queries is None:
            queries = VECTORS[:1].repeat(len(examples), 0) * np.arange(len(examples))[:, None].astype(np.float32)
        scores = np.stack([canonical_scores(query, self._vectors) for query in queries])
        ids, scores = top_k(np.tile(np.arange(len(self._vectors)), (len(queries), 1)), scores, k)
        vectors = self._vectors[ids.clip(0)] * (ids != NO_HIT)[..., None]
        passages = [[PASSAGES[i] if i != NO_HIT else EMPTY for i in row] for row in ids.tolist()]
        return Found(ids, scores, passages, vectors if self._with_vectors else None)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.models(folder)
    return folder


def build(folder: Path, retriever: Any = None, precise: bool = True, **sections: dict[str, Any]) -> RagLoss:
    return tiny.objective(folder, retriever or Exact(), tiny.settings(**sections), precise)


def run(objective: RagLoss, examples: Sequence[Example]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients."""
    tiny.no_gradients(objective)
    total = objective(objective.collate(examples)).total
    total.backward()
    return total.detach(), tiny.gradients(objective)


def test_on_a_gpu_loss_and_gradients_are_those_of_the_cpu(folder: Path) -> None:
    """A pretended one: what is retrieved and tokenized comes from the CPU, and has to move."""
    examples, losses = tiny.examples(4), []
    with gpu() as device:
        for where in ("cpu", device):
            objective = build(folder, optimizer={"label_smoothing": 0.1}).to(where)
            assert objective.device == torch.device(where)
            loss, gradients = run(objective, examples)
            losses.append((loss.cpu(), {name: gradient.cpu() for name, gradient in gradients.items()}))
    same(losses[1], losses[0])


def test_a_query_encoder_that_overflows_has_diverged(folder: Path) -> None:
    objective = build(folder)
    with torch.no_grad():
        next(objective.query_encoder.parameters()).fill_(torch.inf)
    with pytest.raises(TrainingDiverged, match="queries are not finite any more"):
        objective.collate(tiny.examples(1))


def same(one: Any, other: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("formulation", Formulation)
@pytest.mark.parametrize("k", [1, 3])
def test_loss_and_all_gradients_are_those_of_transformers(folder: Path, formulation: Formulation, k: int) -> None:
    """From texts: questions and contexts tokenized here, scored from the vectors, answers of two tokens and more."""
    objective, examples = build(folder, models={"formulation": formulation}, retrieval={"k": k}), tiny.examples(4)
    loss, got = run(objective, examples)
    found = objective.retrieve(examples)

    encoder, generator = objective.query_encoder, objective.generator
    asked, reads = objective._encoder.tokenizer, objective._reads.tokenizer
    config = RagConfig.from_question_encoder_generator_configs(encoder.config, generator.config, n_docs=k)
    rag = KINDS[formulation](config=config, question_encoder=encoder, generator=generator)
    rag.zero_grad()
    questions = asked([example.text for example in examples], return_tensors="pt", padding=True)
    queries = encoder(questions["input_ids"], questions["attention_mask"]).pooler_output
    scores = torch.bmm(queries[:, None], torch.from_numpy(VECTORS[found.ids]).double().transpose(1, 2))[:, 0]
    contexts = reads(
        [
            f"{passage.title} / {passage.text} // {example.text}"
            for example, row in zip(examples, found.passages, strict=True)
            for passage in row
        ],
        return_tensors="pt",
        padding="max_length",
        max_length=80,
    )
    answers = [[2, *reads(example.target, add_special_tokens=False)["input_ids"], 2] for example in examples]
    longest = max(map(len, answers))
    output = rag(
        context_input_ids=contexts["input_ids"],
        context_attention_mask=contexts["attention_mask"],
        doc_scores=scores,
        labels=torch.tensor([answer + [1] * (longest - len(answer)) for answer in answers]),
    )
    output.loss.sum().backward()
    same(loss, output.loss.sum().detach())
    wanted = {
        name.replace("rag.question_encoder", "query_encoder").replace("rag.generator", "generator"): gradient
        for name, gradient in tiny.gradients(rag).items()
    }
    for name, parameter in objective.named_parameters():
        none = torch.zeros_like(parameter)
        same(got.get(name, none), wanted.get(name, none))
    assert any(name.startswith("generator") for name in got)
    if k > 1:
        assert max(float(g.abs().max()) for name, g in got.items() if name.startswith("query_encoder")) > 1e-3


@pytest.mark.parametrize("formulation", Formulation)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_are_those_of_finite_differences(folder: Path, formulation: Formulation, smoothing: float) -> None:
    objective = build(folder, models={"formulation": formulation}, optimizer={"label_smoothing": smoothing})
    collated = objective.collate(tiny.examples(3))
    inputs = collated.context_ids, collated.context_mask, objective.scores(collated), collated.labels
    smoothed = marginal.loss(objective.reader, *inputs, formulation, label_smoothing=smoothing)
    same(objective(collated).total, smoothed.sum())
    tiny.no_gradients(objective)
    objective(collated).total.backward()
    random, step = np.random.default_rng(0), 1e-5
    for name, parameter in objective.named_parameters():
        if parameter.grad is None or random.random() > 0.4:
            continue
        flat, gradient = parameter.detach().view(-1), parameter.grad.view(-1)
        element = int(gradient.abs().argmax()) if random.random() < 0.5 else int(random.integers(len(flat)))
        values = []
        for moved in (step, -2 * step):
            flat[element] += moved
            with torch.no_grad():
                values.append(objective(collated).total.item())
        flat[element] += step
        slope = (values[0] - values[1]) / (2 * step)
        assert gradient[element].item() == pytest.approx(slope, abs=1e-6, rel=1e-6), name


@pytest.mark.parametrize("formulation", Formulation)
def test_empty_slots_change_nothing(folder: Path, formulation: Formulation) -> None:
    models = {"formulation": formulation}
    wide = build(folder, Exact(2), models=models, retrieval={"k": 5})
    collated = wide.collate(tiny.examples(3))
    assert collated.scores.isneginf().tolist() == [[False, False, True, True, True]] * 3
    assert collated.context_mask.view(3, 5, -1)[:, 2:].sum() == 0
    same(run(wide, tiny.examples(3)), run(build(folder, Exact(2), models=models, retrieval={"k": 2}), tiny.examples(3)))


def test_scores_computed_anew_are_those_retrieved(folder: Path) -> None:
    objective = build(folder, Exact(4), precise=False, retrieval={"k": 6})
    collated = objective.collate(tiny.examples(8))
    computed = objective.scores(collated)
    same(computed.detach(), collated.scores, 1e-4)
    assert computed.requires_grad
    assert collated.vectors is not None
    assert not collated.vectors.requires_grad


@pytest.mark.parametrize(
    ("retriever", "sections", "trained"),
    [
        (Exact(), {}, {"query_encoder", "generator"}),
        (Exact(), {"models": {"train_generator": False}}, {"query_encoder"}),
        (Exact(), {"models": {"train_query_encoder": False}}, {"generator"}),
        (Exact(with_vectors=False), {"retrieval": {"kind": "bm25"}}, {"generator"}),
        (Given(), {"retrieval": {"kind": "given"}}, {"generator"}),
        (Nothing(), {"retrieval": {"kind": "none"}}, {"generator"}),
    ],
)
def test_gradients_go_where_the_settings_say(
    folder: Path, retriever: Any, sections: dict[str, Any], trained: set[str]
) -> None:
    objective = build(folder, retriever, **sections)
    _, got = run(objective, tiny.examples(3))
    assert {name.split(".")[0] for name in got} == trained
    assert {name.split(".")[0] for name, p in objective.named_parameters() if p.requires_grad} == trained


def test_without_gradients_for_the_encoder_the_loss_is_that_of_the_scores_retrieved(folder: Path) -> None:
    """A frozen retriever gives what a trained one gives at the same weights; BM25's scores are taken as they are."""
    trained, frozen = build(folder), build(folder, models={"train_query_encoder": False})
    examples = tiny.examples(4)
    same(run(trained, examples)[0], run(frozen, examples)[0], 1e-5)  # those retrieved are float32
    objective = build(folder, Exact(with_vectors=False), retrieval={"kind": "bm25"})
    collated = objective.collate(examples)
    assert torch.equal(objective.scores(collated), collated.scores)
    assert (collated.scores[3] != collated.scores[2]).all()


def test_what_is_read_with_the_question(folder: Path) -> None:
    """`given` reads the question's own passage, `none` the question by itself: with one passage the prior is 1."""
    example = Example("who", "bell", tiny.Question("1", "who", ("bell",), title="moon", context="the moon is"))
    for kind, retriever, memory in (("given", Given(), "moon / the moon is"), ("none", Nothing(), " / ")):
        objective = build(folder, retriever, retrieval={"kind": kind})
        collated = objective.collate([example])
        tokenizer, ids = objective._reads.tokenizer, collated.context_ids[0][collated.context_mask[0] == 1]
        assert tokenizer.decode(ids, skip_special_tokens=True) == f"{memory} // who".replace("  ", " ")
        inputs = torch.tensor([[2, *tokenizer("bell", add_special_tokens=False)["input_ids"]]])
        logits = objective.generator(input_ids=ids[None], decoder_input_ids=inputs).logits[0]
        wanted = torch.nn.functional.cross_entropy(logits, torch.tensor([*inputs[0, 1:], 2]), reduction="sum")
        same(run(objective, [example])[0], wanted.detach())


@pytest.mark.parametrize("dropout", [False, True])
def test_computing_the_encoder_twice_changes_nothing(folder: Path, dropout: bool) -> None:
    results, n_computed = [], [0, 0]

    def computed(*_: object) -> None:
        n_computed[len(results)] += 1

    for twice in (True, False):
        objective = build(folder, models={"dropout": dropout}, loop={"gradient_checkpointing": twice})
        hook = objective.reader._twin.get_encoder().register_forward_pre_hook(computed)
        torch.manual_seed(3)
        results.append(run(objective, tiny.examples(4)))
        hook.remove()
    same(*results)
    assert n_computed[0] == 2 * n_computed[1] > 0
    torch.manual_seed(4)
    other = run(objective, tiny.examples(4))[0]
    assert torch.allclose(other, results[0][0], rtol=1e-9) != dropout  # computed in another way: not to the bit


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_vocabulary_in_slices_changes_nothing(
    folder: Path, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for limit, tile in ((1 << 24, (1024, 1024)), (1000, (3, 7))):
        monkeypatch.setattr("openbook.models.vocabulary._MAX_LOGITS", limit)
        monkeypatch.setattr("openbook.models.vocabulary._TILE", tile)
        results.append(run(build(folder, optimizer={"label_smoothing": smoothing}), tiny.examples(4)))
    same(*results)


@pytest.mark.parametrize("formulation", Formulation)
def test_the_loss_of_a_batch_is_the_sum_of_its_micro_batches(folder: Path, formulation: Formulation) -> None:
    """Whatever is padded in one and not in the other."""
    objective, examples = build(folder, models={"formulation": formulation}), tiny.examples(8)
    whole, wanted = run(objective, examples)
    for size in (1, 2, 4):
        tiny.no_gradients(objective)
        parts = [objective(objective.collate(examples[i : i + size])).total for i in range(0, 8, size)]
        total = torch.stack(parts).sum()
        total.backward()
        same((total.detach(), tiny.gradients(objective)), (whole, wanted))


@pytest.mark.parametrize("formulation", Formulation)
@pytest.mark.parametrize(("most", "sizes"), [(1, [1] * 5), (500, [3, 2]), (1 << 12, [5])])
def test_a_micro_batch_is_the_sum_of_its_portions(
    folder: Path, formulation: Formulation, most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PORTIONS, "cpu", most)
    objective = build(folder, models={"formulation": formulation})
    collated = objective.collate(tiny.examples(5))
    tiny.no_gradients(objective)
    whole = objective(collated)
    whole.total.backward()
    wanted = {name: gradient.clone() for name, gradient in tiny.gradients(objective).items()}
    tiny.no_gradients(objective)
    portions = list(objective.portions(collated))
    losses = [objective(portion) for portion in portions]
    assert [len(portion.labels) for portion in portions] == sizes
    assert all((portion.labels != IGNORED).any(0).all() for portion in portions)
    torch.stack([loss.total for loss in losses]).sum().backward()
    same(sum(loss.total for loss in losses), whole.total)
    same(tiny.gradients(objective), wanted)
    for name, value in whole.sums.items():
        assert sum(loss.sums[name] for loss in losses) == pytest.approx(value)


def test_what_a_person_sees(folder: Path) -> None:
    objective, examples = build(folder, Exact(2), retrieval={"k": 4}), tiny.examples(3)
    collated = objective.collate(examples)
    sums = objective(collated).sums
    p = objective.scores(collated)[:, :2].softmax(-1)
    assert sums["prior_entropy"] == pytest.approx(-(p * p.log()).sum().item())
    assert sums["distinct_passages"] == 2
    n_read = sum(len(row) for e in examples for row in objective._reads.contexts(e.text, PASSAGES[:2]))
    assert sums["tokens"] == n_read + sum(len(e.target) + 1 for e in examples)


def test_labels_are_answers_as_decoding_gives_them(folder: Path) -> None:
    objective = build(folder)
    ids = objective._reads.tokenizer("bell", add_special_tokens=False)["input_ids"]
    assert objective.labels(["bell", "b"]).tolist() == [[*ids, 2], [ids[0], 2, *[IGNORED] * 3]]
    objective.reader.special = type(objective.reader.special)(2, (2,), 1, forced_bos=0)
    assert objective.labels(["b"]).tolist() == [[0, ids[0], 2]]


def test_labels_of_one_token_have_no_end(folder: Path) -> None:
    """Section 3.4 of the paper; where one of them is longer, all of them have one, or "ab" could never beat "a"."""
    task = {"kind": "classification", "labels": {"SUPPORTS": "y", "REFUTES": "n"}}
    objective = build(folder, task=task)
    y, n = (objective._reads.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in "yn")
    assert objective.labels(["y", "n"]).tolist() == [[y], [n]]
    claims = [Example("moon", "y", tiny.Question("1", "moon", ("SUPPORTS",)))] * 2
    losses = [
        run(build(folder, task=task, models={"formulation": formulation}), claims)[0] for formulation in Formulation
    ]
    same(*losses)
    objective.reader.special = type(objective.reader.special)(2, (2,), 1, forced_bos=0)
    assert objective.labels(["y"]).tolist() == [[0, y]], "where it is read when labels are chosen"
    longer = build(folder, task={"kind": "classification", "labels": {"SUPPORTS": "y", "REFUTES": "no"}})
    assert longer.labels(["y"]).tolist() == [[y, 2]]


def test_what_is_too_long_is_found_before_it_is_trained_on(folder: Path) -> None:
    """The generator's room and the answer's length are limits; the question encoder reads the beginning, as DPR's."""
    objective = build(folder, task={"max_target_tokens": 5})
    fits = Example("who " * 24, "bell", tiny.Question("1", ""))
    objective.check(fits)
    for example, problem in (
        (Example("who " * 40, "bell", fits.question), "question has 166 tokens, and the generator can read 128"),
        (Example("who", "bells", fits.question), r"must have 1\.\.task.max_target_tokens = 5 tokens, got 6 in 'bells'"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            objective.check(example)
        with pytest.raises(InvalidRequest, match=problem):
            objective.collate([example])
    patient = build(folder, task={"max_target_tokens": 600})
    patient.check(Example("who", "a" * 127, fits.question))
    with pytest.raises(InvalidRequest, match=r"must have 1\.\.the generator's positions = 128 tokens, got 129"):
        patient.check(Example("who", "a" * 128, fits.question))
    limit = objective._encoder.pooling.max_tokens
    long = Example("a " * (2 * limit), "bell", fits.question)
    ids, mask = objective._question_ids([long])
    assert ids.shape == (1, limit)
    assert mask.all()


def test_passages_longer_than_the_room_are_cut(folder: Path) -> None:
    class Long(Exact):
        def find(self, examples: Sequence[Example], queries: Float32 | None, k: int) -> Found:
            found = super().find(examples, queries, k)
            long = [[Passage(p.id, "", p.title, p.text * 20) for p in row] for row in found.passages]
            return Found(found.ids, found.scores, long, found.vectors)

    objective = build(folder, Long())
    collated = objective.collate(tiny.examples(2))
    assert collated.context_ids.shape == (6, 128)
    assert run(objective, tiny.examples(2))[0].isfinite()


def test_queries_are_float32_and_collating_them_leaves_what_autocast_has_rounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are collated beside a computation, and torch clears one cache for all threads where one leaves autocast."""
    cleared: list[bool] = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(True))
    objective = build(folder, precise=False)
    collated = objective.collate(tiny.examples(4))
    assert not cleared
    wanted = objective.scores(collated)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(objective.scores(collated), wanted)
