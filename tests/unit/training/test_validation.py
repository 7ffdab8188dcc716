"""How well the weights of now answer, counted by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_training as tiny
import torch

from openbook.core.types import NO_HIT, Formulation
from openbook.corpus.questions import Question
from openbook.models import decoding, marginal
from openbook.models.checkpoint import GeneratorCheckpoint
from openbook.training.data import Example
from openbook.training.loss import RagLoss
from openbook.training.retrieval import Given, MemoryIndex
from openbook.training.validation import NAMES, Validation, _scores
from openbook.training.world import Alone, World


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    tiny.models(folder)
    tiny.snapshot(folder)
    return folder


@pytest.fixture
def retriever(folder: Path) -> MemoryIndex:
    return MemoryIndex(folder / "snapshot", torch.device("cpu"))


def parts(folder: Path, retriever: Any, **sections: dict[str, Any]) -> tuple[RagLoss, Any]:
    asked = tiny.settings(**sections)
    return tiny.objective(folder, retriever, asked, precise=False), asked


def validation(objective: RagLoss, asked: Any, examples: Sequence[Example], world: World | None = None) -> Validation:
    return Validation(objective, objective._reads, examples, asked, world or Alone())


def log_likelihood(objective: RagLoss, example: Example) -> float:
    with torch.no_grad():
        return -float(objective(objective.collate([example])).total)


@pytest.mark.parametrize("formulation", Formulation)
def test_numbers_of_a_retriever_that_is_trained(folder: Path, retriever: MemoryIndex, formulation: Formulation) -> None:
    objective, asked = parts(folder, retriever, models={"formulation": formulation})
    examples = tiny.examples(11)
    check = validation(objective, asked, examples)
    rows = check.measured()
    assert rows.shape == (11, len(NAMES))
    log_p, right, overlap, recalled, entropy, agreement = rows.T
    wanted = [log_likelihood(objective, example) for example in examples]
    np.testing.assert_allclose(log_p, wanted, rtol=1e-4)
    assert not right.any()  # random weights
    assert (overlap < 1).all()
    found = objective.retrieve(examples)
    assert recalled.tolist() == [
        any(f" {example.target} " in f" {passage.text} " for passage in row)
        for example, row in zip(examples, found.passages, strict=True)
    ]
    assert 0 < recalled.sum() < 11
    prior = np.exp(found.scores - np.logaddexp.reduce(found.scores, 1, keepdims=True))
    np.testing.assert_allclose(entropy, -(prior * np.log(prior.clip(1e-30))).sum(1), atol=1e-4)
    assert agreement.tolist() == [1.0] * 11
    assert check() == pytest.approx(dict(zip(NAMES, rows.mean(0).tolist(), strict=True)))


def test_agreement_falls_when_the_retriever_changes(folder: Path, retriever: MemoryIndex) -> None:
    objective, asked = parts(folder, retriever)
    examples = tiny.examples(8)
    before = objective.retrieve(examples).ids
    check = validation(objective, asked, examples)
    with torch.no_grad():
        for parameter in objective.query_encoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    after = objective.retrieve(examples).ids
    shares = [len({*one} & {*other}) / 3 for one, other in zip(before.tolist(), after.tolist(), strict=True)]
    assert check.measured()[:, NAMES.index("agreement")].tolist() == pytest.approx(shares)
    assert sum(shares) < 8


def test_slots_without_a_passage_agree_with_nothing(
    folder: Path, retriever: MemoryIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, asked = parts(folder, retriever, task={"max_target_tokens": 12}, retrieval={"k": 20})
    examples = tiny.examples(2)
    check = validation(objective, asked, examples)
    assert check()["agreement"] == 1.0
    then = objective.retrieve(examples)
    others = replace(then, ids=np.where(then.ids == NO_HIT, NO_HIT, then.ids + 100))
    monkeypatch.setattr(check, "_found", lambda _: others)
    assert check()["agreement"] == 0.0


def test_answers_count_if_one_of_them_is_met(folder: Path, retriever: MemoryIndex) -> None:
    """Also those that are no example's target, and regular expressions, of which no probability is known."""
    objective, asked = parts(folder, retriever)
    (first,) = tiny.examples(1)
    found = objective.retrieve([first])
    collated = objective.as_tensors([first], found)
    (said,) = validation(objective, asked, [first])._answers(objective.reader, collated, found)
    assert said.strip()
    of_two = Example(first.text, "bell", Question("", first.text, ("bell", said)))
    pattern = Example(first.text, "", Question("", first.text, answer_regex=f"^{'.' * len(said)}$"))
    rows = validation(objective, asked, [first, of_two, pattern]).measured()
    assert rows[:, NAMES.index("exact_match")].tolist() == [0, 1, 1]
    assert np.isnan(rows[:, 0]).tolist() == [False, False, True]
    both = validation(objective, asked, [of_two, pattern])()
    assert both["log_likelihood"] == pytest.approx(rows[1, 0])
    assert both["exact_match"] == 1.0
    assert "log_likelihood" not in validation(objective, asked, [pattern])()


def test_a_question_that_is_generated_is_right_if_it_was_asked() -> None:
    """Though the file's answers are what it is generated of."""
    generated = Example("bell", "who called", Question("", "who called", ("bell",)))
    assert [_scores(text, generated, {}) for text in ("who called", "bell")] == [(1.0, 1.0), (0.0, 0.0)]


@pytest.mark.parametrize(
    ("max_target_tokens", "n_positions", "n_tokens"), [(64, 128, 64), (600, 128, 128), (600, None, 512)]
)
def test_answers_may_be_as_long_as_those_that_are_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_target_tokens: int, n_positions: int | None, n_tokens: int
) -> None:
    monkeypatch.setattr(GeneratorCheckpoint, "max_answer_tokens", n_positions)
    task, models = {"max_target_tokens": max_target_tokens}, {"formulation": "token"}
    objective, asked = parts(folder, Given(), task=task, models=models, retrieval={"kind": "given"})
    generate, asked_for = decoding.generate, list[tuple[Formulation, int]]()

    def generated(*given: Any) -> Any:
        asked_for.append((given[-1].formulation, given[-1].max_new_tokens))
        return generate(*given[:-1], replace(given[-1], max_new_tokens=1))

    monkeypatch.setattr(decoding, "generate", generated)
    validation(objective, asked, tiny.examples(1)).measured()
    assert asked_for == [(Formulation.TOKEN, n_tokens)]


def test_classes_are_chosen_by_probability(folder: Path) -> None:
    labels = {"SUPPORTS": "y", "REFUTES": "n"}
    task = {"kind": "classification", "labels": labels}
    objective, asked = parts(folder, Given(), task=task, retrieval={"kind": "given"})
    claims = [
        Example(text, labels[label], Question("", text, (label,), context="moon"))
        for text, label in zip(tiny.texts(6, 3), [*labels] * 3, strict=True)
    ]
    found = validation(objective, asked, claims)()
    assert "has_answer" not in found
    of_words = [[log_likelihood(objective, replace(claim, target=word)) for word in "yn"] for claim in claims]
    right = [(each[0] >= each[1]) == (claim.target == "y") for each, claim in zip(of_words, claims, strict=True)]
    assert found["exact_match"] == found["f1"] == pytest.approx(np.mean(right))
    assert 0 < sum(right) < 6
    of_right = [each["yn".index(claim.target)] for each, claim in zip(of_words, claims, strict=True)]
    assert found["log_likelihood"] == pytest.approx(np.mean(of_right), rel=1e-4)


def test_classes_are_right_letter_for_letter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"c": "C", "cpp": "C++", "csharp": "C#"}
    task = {"kind": "classification", "labels": labels}
    objective, asked = parts(folder, Given(), task=task, retrieval={"kind": "given"})
    claims = [Example("moon", "C++", Question("", "moon", ("cpp",), context="moon"))] * 3
    monkeypatch.setattr(Validation, "_answers", lambda *_: [*labels.values()])
    rows = validation(objective, asked, claims).measured()
    assert rows[:, NAMES.index("exact_match")].tolist() == rows[:, NAMES.index("f1")].tolist() == [0, 1, 0]


def test_classes_are_chosen_as_when_they_are_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A BOS that the model forces is read before them, and its probability does not count."""
    task = {"kind": "classification", "labels": {"SUPPORTS": "y", "REFUTES": "n"}}
    objective, asked = parts(folder, Given(), task=task, models={"formulation": "token"}, retrieval={"kind": "given"})
    objective.generator.generation_config.forced_bos_token_id = 0
    chosen_from: list[list[int]] = []

    def scored(reader: Any, ids: Any, mask: Any, scores: Any, labels: list[list[int]], formulation: Formulation) -> Any:
        assert formulation is Formulation.TOKEN
        chosen_from.extend(labels)
        return torch.zeros(len(scores), len(labels))

    monkeypatch.setattr(marginal, "label_log_likelihood", scored)
    claim = Example("moon", "y", Question("", "moon", ("SUPPORTS",), context="moon"))
    validation(objective, asked, [claim]).measured()
    words = [objective._reads.tokenizer(word, add_special_tokens=False)["input_ids"] for word in "yn"]
    assert chosen_from == words
    assert [row[0] for row in objective.labels(["y", "n"]).tolist()] == [0, 0], "as they are learned"


@pytest.mark.parametrize("n_workers", [2, 3])
def test_workers_take_shares_and_all_have_the_means_of_all(
    folder: Path, retriever: MemoryIndex, n_workers: int
) -> None:
    objective, asked = parts(folder, retriever)
    examples = tiny.examples(2)  # one worker of three has none
    alone, results = validation(objective, asked, examples)(), []
    together = tiny.Together(n_workers)
    together.run(lambda world: results.append(validation(objective, asked, examples, world)()))
    assert len(results) == n_workers
    for each in results:
        assert each == pytest.approx(alone, rel=1e-5)


def test_the_generator_goes_on_training_afterwards(folder: Path, retriever: MemoryIndex) -> None:
    """Answers are without dropout, whatever the mode; and nothing of it is left in the gradients."""
    objective, asked = parts(folder, retriever, models={"dropout": True})
    check = validation(objective, asked, tiny.examples(2))
    assert check() == check()
    assert objective.generator.training
    assert not objective.query_encoder.training
    assert not tiny.gradients(objective)
