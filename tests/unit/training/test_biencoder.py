"""The bi-encoder's loss against equation 2 of DPR's paper written out, over tiny encoders of both families."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_encoders
import tiny_training as tiny
import torch
import transformers
from torch import Tensor

from openbook.config import EncoderSettings
from openbook.core.types import Passage
from openbook.corpus.questions import Question
from openbook.errors import InvalidConfig, InvalidModel
from openbook.models.encoder import TextEncoder, load_encoder
from openbook.training import biencoder
from openbook.training.biencoder import BiEncoderJob, BiEncoderLoss, Validation
from openbook.training.data import Example
from openbook.training.loop import Loop
from openbook.training.pairs import Pair
from openbook.training.settings import TrainingSettings
from openbook.training.world import Alone, World

TEXTS = [  # question, answer, positive, negatives
    ("who invented the telephone", "bell", "alexander graham bell invented the telephone", ["the telephone", "a text"]),
    ("where was curie born", "warsaw", "marie curie was born in warsaw", ["marie curie was born"]),
    ("what is long", "nile", "the river nile is long", ["a river is long and a title is short"]),
    ("what is the moon of", "earth", "the moon of the earth", []),
]
PAIRS = [
    Pair(
        Example(question, answer, Question(question, question, (answer,))),
        Passage(-1, "", "title", positive),
        tuple(Passage(i, "", "title", text) for i, text in enumerate(negatives)),
    )
    for question, answer, positive, negatives in TEXTS
]
# Its question is answered by the second's passage, too.
FALSE_NEGATIVE = Pair(
    Example("who was born", "warsaw", Question("q", "who was born", ("warsaw",))),
    Passage(-1, "", "", "seven of warsaw"),
    (Passage(9, "", "", "seven of eight"),),
)
FAMILIES = ["dpr", "sentence", "two sentence towers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Encoders, a snapshot and questions."""
    folder = tmp_path_factory.mktemp("biencoder")
    tokenizer = tiny_encoders.bert_tokenizer()
    tiny_encoders.saved(folder / "sentence", tiny_encoders.bert_model(), tokenizer)
    tiny_encoders.saved(folder / "questions", tiny_encoders.dpr_model(transformers.DPRQuestionEncoder), tokenizer)
    torch.manual_seed(2)
    tiny_encoders.saved(folder / "contexts", transformers.DPRContextEncoder(tiny_encoders.DPR), tokenizer)
    wide = transformers.DPRConfig(**{**tiny_encoders.DPR.to_dict(), "projection_dim": 24})
    tiny_encoders.saved(folder / "wide", transformers.DPRContextEncoder(wide), tokenizer)
    tiny.snapshot(folder)
    tiny.questions(folder)
    return folder


def names(family: str, folder: Path) -> tuple[str, str | None]:
    """Of query and passage encoder."""
    if family == "dpr":
        return str(folder / "questions"), str(folder / "contexts")
    return str(folder / "sentence"), None if family == "sentence" else str(folder / "sentence")


def objective(family: str, folder: Path, recompute: bool = False, precise: bool = True) -> BiEncoderLoss:
    query, passage = names(family, folder)
    query_encoder = load_encoder(query)
    passage_encoder = query_encoder if passage is None else load_encoder(passage, "passage")
    loss = BiEncoderLoss(query_encoder, passage_encoder, recompute)
    return loss.double() if precise else loss


def scores(family: str, folder: Path, pairs: list[Pair], others: Sequence[Passage] = ()) -> Iterator[list[float]]:
    """For each question those of its positive and of all passages that do not answer it, as they are served."""
    query, passage = names(family, folder)
    asks = TextEncoder.load(EncoderSettings(model=query))
    reads = TextEncoder.load(EncoderSettings(model=passage or query), role="passage")
    passages = [z for pair in pairs for z in (pair.positive, *pair.negatives)] + list(others)
    vectors = reads.encode_passages(passages)
    for pair, vector in zip(pairs, asks.encode_questions([pair.example.text for pair in pairs]), strict=True):
        wrong = [pair.example.target not in each.text.split() for each in passages]
        yield [float(vectors[passages.index(pair.positive)] @ vector), *(vectors[wrong] @ vector).tolist()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pairs", [PAIRS, PAIRS[:1], [*PAIRS, FALSE_NEGATIVE]], ids=["all", "one", "false negative"])
def test_the_loss_is_the_positives_among_all_passages_of_the_micro_batch(
    family: str, folder: Path, pairs: list[Pair]
) -> None:
    expected = list(scores(family, folder, pairs))
    loss = objective(family, folder)
    found = loss(loss.collate(pairs))
    assert found.total.item() == pytest.approx(sum(np.log(np.exp(row).sum()) - row[0] for row in expected), abs=1e-4)
    assert found.sums["accuracy"] == sum(np.argmax(row) == 0 for row in expected)


def test_a_passage_of_two_questions_is_no_negative_of_either(folder: Path) -> None:
    loss = objective("dpr", folder)
    other = Question("q", "what is a title", ("no such answer",))
    twins = [Pair(PAIRS[0].example, PAIRS[0].positive, ()), Pair(Example(other.text, "", other), PAIRS[0].positive, ())]
    # The log-softmax of one score, whose last bit depends on the processor.
    assert loss(loss.collate(twins)).total.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_slope_of_the_loss(family: str, folder: Path) -> None:
    loss = objective(family, folder)
    collated = loss.collate(PAIRS)
    loss(collated).total.backward()
    gradients = tiny.gradients(loss)
    assert any(name.startswith("passage_encoder") for name in gradients) == (family != "sentence")
    assert any(name.startswith("query_encoder") for name in gradients)
    torch.manual_seed(0)
    parameters = {name: each for name, each in loss.named_parameters() if name in gradients}
    direction = {name: torch.randn_like(each) for name, each in parameters.items()}

    def moved(step: float) -> float:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter += step * direction[name]
            return loss(collated).total.item()

    step = 1e-6
    slope = (moved(step) - moved(-2 * step)) / (2 * step)
    expected = sum(float((gradients[name] * direction[name]).sum()) for name in gradients)
    assert slope == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_passages_computed_again_give_the_same(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biencoder, "ROWS_AT_ONCE", 3)
    results = []
    for recompute in (False, True):
        loss = objective(family, folder, recompute)
        total = loss(loss.collate(PAIRS)).total
        total.backward()
        results.append({"loss": total, **tiny.gradients(loss)})
    torch.testing.assert_close(*results)


def test_scores_are_not_rounded_to_bfloat16(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = objective("dpr", folder, precise=False)
    collated = loss.collate(PAIRS)
    queries = loss.queries(collated.query_ids, collated.query_mask)
    passages = loss.passages(collated.passage_ids, collated.passage_mask)
    monkeypatch.setattr(loss, "queries", lambda *_: queries)
    monkeypatch.setattr(loss, "passages", lambda *_: passages)
    wanted = loss(collated).total
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(collated).total, wanted)


def test_several_workers_are_one(folder: Path) -> None:
    asked = settings(folder)

    def trained(world: World) -> dict[str, Tensor]:
        loop = Loop(objective("dpr", folder).train(), PAIRS * 2, asked.loop, asked.optimizer, world=world)
        reports = list(loop.run())
        loop.close()
        return {**{n: p.detach() for n, p in loop.parameters.items()}, "loss": torch.tensor([r.loss for r in reports])}

    alone = trained(Alone())
    results: list[dict[str, Tensor]] = []
    tiny.Together(2).run(lambda world: results.append(trained(world)))
    for result in results:
        torch.testing.assert_close(result, alone, rtol=0, atol=1e-12)


OTHERS = [Passage(i, "", "title", text) for i, text in enumerate(["a passage", "the nile", "in warsaw", "one two"])]


def measured(loss: BiEncoderLoss, world: World | None = None) -> dict[str, float]:
    return Validation(loss, PAIRS, OTHERS, world or Alone())()


@pytest.mark.parametrize("family", FAMILIES)
def test_validation_ranks_positives_among_passages_without_an_answer(family: str, folder: Path) -> None:
    ranks = [sum(score >= row[0] for score in row) for row in scores(family, folder, PAIRS, OTHERS)]
    recalls = {f"recall_at_{k}": np.mean([rank <= k for rank in ranks]) for k in (1, 5, 20)}
    expected = {**recalls, "reciprocal_rank": np.mean([1 / rank for rank in ranks])}
    assert measured(objective(family, folder, precise=False)) == pytest.approx(expected)


def test_an_encoder_that_gives_all_passages_one_vector_finds_nothing(folder: Path) -> None:
    loss = objective("dpr", folder, precise=False)
    for parameter in loss.passage_encoder.parameters():
        parameter.data.zero_()
    assert (measured(loss)["recall_at_1"], measured(loss)["recall_at_20"]) == (0, 1)


def test_workers_share_the_work_of_validation(folder: Path) -> None:
    loss, found = objective("sentence", folder, precise=False), list[dict[str, float]]()
    tiny.Together(2).run(lambda world: found.append(measured(loss, world)))
    assert found == [pytest.approx(measured(loss))] * 2


def settings(folder: Path, **sections: Any) -> TrainingSettings:
    query, passage = names("dpr", folder)
    return tiny.settings(
        **{
            "task": {"train": [{"path": folder / "questions.jsonl"}]},
            "retrieval": {"kind": "bm25", "snapshot": folder / "snapshot"},
            "models": {"query_encoder": query},
            "biencoder": {"passage_encoder": passage},
            **sections,
        }
    )


def job(asked: TrainingSettings) -> BiEncoderJob:
    assert asked.biencoder is not None
    return BiEncoderJob(asked, asked.biencoder, Alone())


def test_each_question_is_one_example_and_both_towers_are_in_the_plan(folder: Path) -> None:
    questions = tiny.jsonl(folder / "answers.jsonl", {"question": "who", "answers": ["a", "b"], "context": "a b"})
    made = job(settings(folder, task={"train": [{"path": questions, "repeat": 2}]}))
    assert [pair.example.text for pair in made.examples] == ["who", "who"]
    query, passage = load_encoder(str(folder / "questions")), load_encoder(str(folder / "contexts"), "passage")
    assert (made.plan["query encoder"], made.plan["passage encoder"]) == (query.fingerprint, passage.fingerprint)
    assert made.plan.keys() == {"snapshot", "bm25", "query encoder", "passage encoder", "towers", "examples"}
    assert made.validate() == {}  # no questions to validate with


def test_one_tower_and_two_alike_are_two_plans(folder: Path) -> None:
    one, two = (
        job(settings(folder, models={"query_encoder": query}, biencoder={"passage_encoder": passage})).plan
        for query, passage in (names("sentence", folder), names("two sentence towers", folder))
    )
    assert one.items() ^ two.items() == {("towers", "1"), ("towers", "2")}


def test_the_query_encoder_can_be_frozen(folder: Path) -> None:
    query, _ = names("dpr", folder)
    made = job(settings(folder, models={"query_encoder": query, "train_query_encoder": False}))
    made.objective(made.objective.collate(made.examples[:2])).total.backward()
    assert {name.split(".")[0] for name in tiny.gradients(made.objective)} == {"passage_encoder"}


def test_dropout_is_on_in_training_and_off_in_validation(folder: Path) -> None:
    query, _ = names("dpr", folder)
    for dropout in (True, False):
        made = job(settings(folder, models={"query_encoder": query, "dropout": dropout}))
        assert made.objective.training is dropout
        made._validation = lambda made=made: {"training": made.objective.training}
        assert made.validate() == {"training": False}
        assert made.objective.training is dropout


def test_what_cannot_be_trained_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="passage_encoder is needed"):
        job(settings(folder, biencoder={"passage_encoder": None}))
    with pytest.raises(InvalidModel, match=r"16 dimensions, passages of .* 24"):
        job(settings(folder, biencoder={"passage_encoder": str(folder / "wide")}))
    with pytest.raises(ValueError, match=r"retrieval\.kind bm25, got 'given'"):
        settings(folder, retrieval={"kind": "given"})
    with pytest.raises(ValueError, match=r"label_smoothing is of a generator's tokens, got 0\.1"):
        settings(folder, optimizer={"label_smoothing": 0.1})
