"""Work stops where a check raises, and is the same where none does."""

import pickle
from collections.abc import Callable
from itertools import chain, groupby, product
from typing import Any

import pytest
import tiny_models as tiny
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer

from openbook.core.deadline import go_on
from openbook.core.types import Decoding, Formulation, GenerationSettings
from openbook.models import seq2seq, vocabulary
from openbook.models.decoding import Seq2Seq, generate, score_answers, stream

SEQUENCE, TOKEN = Formulation
N, K = 2, 3
INPUTS = (*tiny.contexts(0, N * K), tiny.scores(0, N, K))
ONE = (*tiny.contexts(1, K), tiny.scores(1, 1, K)[0])
ANSWERS = [[5, 6, 7, tiny.EOS], [5, 9, tiny.EOS], [8, tiny.EOS]]


def generates(**options: Any) -> Callable[[Seq2Seq], Any]:
    return lambda reader: generate(reader, *INPUTS, GenerationSettings(max_new_tokens=6, min_new_tokens=4, **options))


def streams(**options: Any) -> Callable[[Seq2Seq], Any]:
    settings = GenerationSettings(max_new_tokens=6, min_new_tokens=4, **options)
    return lambda reader: list(stream(reader, *ONE, settings))


WORK = {
    "thorough": generates(formulation=SEQUENCE),
    "fast": generates(formulation=SEQUENCE, decoding=Decoding.FAST),
    "greedy": generates(formulation=SEQUENCE, n_beams=1),
    "sampled": generates(formulation=SEQUENCE, temperature=1.0),
    "token": generates(formulation=TOKEN),
    "token greedy": generates(formulation=TOKEN, n_beams=1),
    "token sampled": generates(formulation=TOKEN, temperature=1.0),
    "stream": streams(formulation=TOKEN, n_beams=1),
    "stream sampled": streams(formulation=TOKEN, temperature=1.0),
    "stream of one step": streams(formulation=SEQUENCE),
    "labels": lambda reader: score_answers(reader, *INPUTS, ANSWERS, SEQUENCE),
    "labels token": lambda reader: score_answers(reader, *INPUTS, ANSWERS, TOKEN),
}


OTHERS = (tiny.mbart, tiny.pegasus, tiny.t5, tiny.switch, tiny.nllb_moe, tiny.bert2bert)


class Stopped(Exception):
    """What a check raises."""


class Watched:
    """A small model, and in which order it computed, by layers or else by portions, and looked at its check.

    By portions it is as a model whose layers are not transformers' own: nothing is known of them.
    """

    def __init__(self, by_layers: bool = True) -> None:
        self.reader = Seq2Seq(tiny.bart())
        self.events: list[str] = []
        twin = self.reader._twin
        layers = [module for module in twin.modules() if type(module) in (BartEncoderLayer, BartDecoderLayer)]
        for layer in () if by_layers else layers:
            layer._forward_pre_hooks.clear()
        for module in layers if by_layers else (twin, twin.get_encoder()):
            module.register_forward_hook(lambda *_: self.events.append("computes"))

    def run(self, work: Callable[[Seq2Seq], Any], n_checks: int | None = None) -> list[str]:
        """The events of some work, which its n-th check stops."""
        self.events.clear()

        def check() -> None:
            self.events.append("checks")
            if self.events.count("checks") == n_checks:
                raise Stopped

        work(self.reader.stopped_by(check))
        return list(self.events)


@pytest.mark.parametrize("by_layers", [True, False])
@pytest.mark.parametrize("name", WORK)
def test_work_stops_before_the_next_layer_or_portion(
    name: str, by_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(seq2seq._AT_ONCE, "cpu", 16)
    watched, work = Watched(by_layers), WORK[name]
    whole = watched.run(work)
    longest = max(len(list(run)) for event, run in groupby(whole) if event == "computes")
    assert (whole[0], longest) == ("checks", 1)  # never two without a look at the check
    checks = [i for i, event in enumerate(whole) if event == "checks"]
    for n in (1, 2, len(checks) // 2, len(checks)):
        with pytest.raises(Stopped):
            watched.run(work, n)
        assert watched.events == whole[: checks[n - 1] + 1]


@pytest.mark.parametrize("name", WORK)
def test_a_check_that_does_not_stop_it_changes_nothing(name: str) -> None:
    reader = Watched().reader
    assert pickle.dumps(WORK[name](reader.stopped_by(go_on))) == pickle.dumps(WORK[name](reader))


@pytest.mark.parametrize(("name", "build"), [*product(WORK, [tiny.bart]), *product(["thorough"], OTHERS)])
def test_what_is_computed_while_a_check_is_called_changes_nothing(
    name: str, build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short questions and the tokens of streams are answered there, by the same model."""
    monkeypatch.setattr(vocabulary, "_TILE", (16, 16))  # several to a vocabulary of 50
    monkeypatch.setitem(seq2seq._AT_ONCE, "cpu", 16)
    reader, within = Seq2Seq(build()), list[str]()
    wanted = pickle.dumps(WORK[name](reader))

    def check() -> None:
        if not within:
            within.append(name)
            generate(reader, *INPUTS, GenerationSettings(max_new_tokens=2, formulation=TOKEN, n_beams=1))
            score_answers(reader, *INPUTS, ANSWERS[1:], SEQUENCE)
            within.clear()

    assert pickle.dumps(WORK[name](reader.stopped_by(check))) == wanted


def test_answers_of_many_tokens_are_scored_in_portions_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = WORK["labels"](Seq2Seq(tiny.bart()))
    monkeypatch.setitem(seq2seq._AT_ONCE, "cpu", 4)  # less than one row has
    portions = WORK["labels"](Seq2Seq(tiny.bart()))
    for one, other in zip(chain(*whole), chain(*portions), strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-9)
