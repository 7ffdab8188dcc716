"""What the generator reads, and what it writes: the embedded reader on real text, tiny random models for the rest."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openbook.config import GeneratorSettings
from openbook.core.marginal import log_prior
from openbook.core.spelling import Letters, letters_of
from openbook.core.types import (
    Decoding,
    Float32,
    Formulation,
    Generation,
    GenerationSettings,
    Passage,
    Retrieved,
    Token,
)
from openbook.errors import InvalidRequest
from openbook.models import decoding
from openbook.models import generator as generator_module
from openbook.models.checkpoint import GeneratorCheckpoint, load_generator
from openbook.models.formats import PairFormat, RagFormat
from openbook.models.generator import RagGenerator
from openbook.models.seq2seq import Contexts, Seq2Seq

BELL = Passage(
    0,
    "bell",
    "Telephone",
    "Alexander Graham Bell was awarded the first United States patent for the telephone in 1876.",
)
CURIE = Passage(
    1, "curie", "Marie Curie", "Marie Curie was born in Warsaw in 1867 and moved to Paris at the age of 24."
)
MOON = Passage(2, "moon", "Moon", "The Moon is the only natural satellite of the Earth, 384,400 km away.")

GREEDY_TOKEN = GenerationSettings(formulation=Formulation.TOKEN, n_beams=1)
ALL_SETTINGS = [
    GenerationSettings(formulation=Formulation.SEQUENCE, decoding=Decoding.THOROUGH, n_beams=3, max_new_tokens=16),
    GenerationSettings(formulation=Formulation.SEQUENCE, decoding=Decoding.FAST, n_beams=1, max_new_tokens=16),
    GenerationSettings(formulation=Formulation.TOKEN, n_beams=3, max_new_tokens=16),
    GREEDY_TOKEN,
]


def _retrieved(*hits: tuple[Passage, float]) -> Retrieved:
    scores: Float32 = np.array([score for _, score in hits], np.float32)
    return Retrieved(tuple(passage for passage, _ in hits), scores, "snapshot")


# Scores as the embedded encoder gives them.
TELEPHONE = ("who invented the telephone?", _retrieved((BELL, 13.5), (CURIE, 3.1), (MOON, 0.2)))
BIRTH = ("where was Marie Curie born?", _retrieved((CURIE, 12.7), (BELL, 1.3)))


@cache
def _reader() -> RagGenerator:
    return RagGenerator.load(GeneratorSettings())


@cache
def _one_by_one() -> RagGenerator:
    return RagGenerator.load(GeneratorSettings(max_tokens_in_flight=1))


@cache
def _babbler() -> RagGenerator:
    """Writes random bytes, few of which are characters by themselves."""
    return RagGenerator(GeneratorCheckpoint(tiny.bart(), tiny.byte_tokenizer(), RagFormat(128)), GeneratorSettings())


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many contexts were encoded together, each time."""
    sizes, encode = list[int](), Seq2Seq.encode

    def counted(self: Seq2Seq, ids: Tensor, mask: Tensor) -> Contexts:
        sizes.append(len(ids))
        return encode(self, ids, mask)

    monkeypatch.setattr(Seq2Seq, "encode", counted)
    return sizes


class TestReader:
    @pytest.mark.parametrize("how", ALL_SETTINGS)
    def test_answers_from_the_passage_that_has_the_answer(self, how: GenerationSettings) -> None:
        telephone, birth = _reader().generate(*zip(TELEPHONE, BIRTH, strict=True), how)
        assert "Bell" in telephone.text
        assert birth.text == "Warsaw"
        for (_, retrieved), generation in ((TELEPHONE, telephone), (BIRTH, birth)):
            assert generation.log_prior == pytest.approx(log_prior(retrieved.scores))
            assert np.exp(generation.log_posterior).sum() == pytest.approx(1)
            assert generation.log_posterior.argmax() == 0
            assert generation.log_posterior[0] > generation.log_prior[0]
            assert generation.log_likelihood < 0

    def test_the_answer_changes_with_the_passage(self) -> None:
        other = replace(CURIE, text=CURIE.text.replace("Warsaw", "Vienna"))
        (generation,) = _reader().generate([BIRTH[0]], [_retrieved((other, 1.0))], GREEDY_TOKEN)
        assert generation.text == "Vienna"

    @pytest.mark.parametrize("how", ALL_SETTINGS)
    def test_what_else_is_in_the_batch_changes_nothing(self, how: GenerationSettings) -> None:
        together = _reader().generate(*zip(TELEPHONE, BIRTH, strict=True), how)
        alone = [_reader().generate([question], [retrieved], how)[0] for question, retrieved in (TELEPHONE, BIRTH)]
        _assert_equal(together, alone)

    def test_a_small_bound_on_memory_changes_nothing_else(self, encoded: list[int]) -> None:
        for how in ALL_SETTINGS[::2]:
            batch = list(zip(TELEPHONE, BIRTH, strict=True))
            _assert_equal(_one_by_one().generate(*batch, how), _reader().generate(*batch, how))
        assert len(encoded) == 2 * (2 + 1)

    def test_reads_in_bfloat16(self) -> None:
        rough = RagGenerator.load(GeneratorSettings(dtype="bfloat16"))
        (generation,) = rough.generate([BIRTH[0]], [BIRTH[1]], GREEDY_TOKEN)
        assert generation.text == "Warsaw"
        assert rough.fingerprint == _reader().fingerprint
        assert rough.generates_by != _reader().generates_by, "or a cache would hand one's answers to the other"

    def test_refuses_a_question_that_leaves_no_room_for_a_passage(self) -> None:
        question = "who " * 221
        with pytest.raises(InvalidRequest, match="question has 224 tokens, and the generator can read 224"):
            _reader().generate([question], [BIRTH[1]], GREEDY_TOKEN)

    def test_refuses_a_question_without_passages(self) -> None:
        with pytest.raises(InvalidRequest, match="at least one passage"):
            _reader().generate([TELEPHONE[0], "why?"], [TELEPHONE[1], _retrieved()], GREEDY_TOKEN)
        with pytest.raises(InvalidRequest, match="at least one passage"):
            list(_reader().stream("why?", _retrieved(), GREEDY_TOKEN))

    def test_computes_with_as_many_threads_as_it_was_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever another model of this process computes with."""
        reader, chosen = _reader(), list[int]()
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        monkeypatch.setattr(torch, "set_num_threads", chosen.append)
        reader.generate([BIRTH[0]], [BIRTH[1]], GREEDY_TOKEN)
        assert chosen == [reader._n_threads]

    def test_no_questions_have_no_answers(self) -> None:
        assert _reader().generate([], [], GREEDY_TOKEN) == []


class TestStream:
    @pytest.mark.parametrize("n_tokens", [1, 8, 40])
    @pytest.mark.parametrize("generator", [_reader, _babbler])
    def test_deltas_join_to_the_text_that_generate_gives(
        self, generator: Callable[[], RagGenerator], n_tokens: int
    ) -> None:
        how = replace(GREEDY_TOKEN, max_new_tokens=n_tokens)
        *deltas, last = generator().stream(*TELEPHONE, how)
        (expected,) = generator().generate([TELEPHONE[0]], [TELEPHONE[1]], how)
        assert isinstance(last, Generation)
        _assert_equal([last], [expected])
        streamed = "".join(delta.text for delta in deltas)
        assert streamed == (last.text.lower() if generator is _reader else last.text)
        assert len(deltas) == len(last.token_ids)
        assert sum(delta.log_likelihood for delta in deltas) == pytest.approx(last.log_likelihood)
        assert [replace(token, start=None, end=None) for token in last.tokens] == deltas

    @pytest.mark.parametrize("how", ALL_SETTINGS[:3])
    def test_what_is_not_decided_token_by_token_comes_alone(self, how: GenerationSettings) -> None:
        only = list(_reader().stream(*BIRTH, how))
        assert [type(item) for item in only] == [Generation]
        assert not isinstance(only[0], Token)
        assert only[0].text == "Warsaw"

    @settings(max_examples=50)
    @given(text=st.text(max_size=12))
    def test_text_only_grows_and_ends_whole_at_whatever_byte_it_is_cut(self, text: str) -> None:
        ids = tiny.byte_tokenizer()(text)["input_ids"]
        texts = [_babbler()._checkpoint.text(ids[:n]) for n in range(len(ids) + 1)]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert texts[-1] == text.rstrip("\N{REPLACEMENT CHARACTER}").strip()


def test_what_answers_begin_and_end_with_tells_generators_of_the_same_weights_apart() -> None:
    """Or a cache would hand one's answers to the other."""
    bart = tiny.bart()
    bart.generation_config.forced_bos_token_id = 7
    other = RagGenerator(GeneratorCheckpoint(bart, tiny.byte_tokenizer(), RagFormat(128)), GeneratorSettings())
    assert other.fingerprint == _babbler().fingerprint
    assert other.generates_by != _babbler().generates_by


def test_an_answer_is_spelled_as_in_the_likeliest_passage_that_has_it_unless_tokens_tell() -> None:
    passages = [replace(MOON, text=text) for text in ("WARSAW", "Warsaw")]
    checkpoints = [generator._checkpoint for generator in (_reader(), _babbler())]
    said = [each.answer(each.answer_ids("warsaw"), passages, np.log([0.1, 0.9])) for each in checkpoints]
    assert said == ["Warsaw", "warsaw"]


def test_what_is_read_of_a_passage_beside_its_text() -> None:
    def read(how: RagFormat | PairFormat, title: str, text: str) -> str:
        (ids,) = how.encode(tiny.byte_tokenizer(), "who?", [replace(MOON, title=title, text=text)])
        return tiny.byte_tokenizer().decode(ids, skip_special_tokens=True)

    assert read(RagFormat(), '"Heroes"', "a  b") == "Heroes / a b // who?"
    assert [read(PairFormat(), title, "b") for title in ("a", "")] == ["who?a : b", "who?b"]


def test_old_rag_checkpoints_read_the_question_as_the_question_encoder_spells_it(tmp_path: Path) -> None:
    name = tiny.save_rag(tmp_path, tiny.rag())
    old = RagGenerator.load(GeneratorSettings(model=name))
    (tmp_path / "openbook.json").write_text('{"legacy": false}')
    new = RagGenerator.load(GeneratorSettings(model=name))
    how, hits = replace(GREEDY_TOKEN, max_new_tokens=4), [_retrieved((MOON, 1.0))]

    def likelihood(generator: RagGenerator, question: str) -> float:
        return generator.generate([question], hits, how)[0].log_likelihood

    question = "Who's the PRESIDENT of France?"
    spelled = "who's the president of france?"
    # Of weights that lie elsewhere in memory, which products may take otherwise.
    assert likelihood(old, question) == pytest.approx(likelihood(new, spelled), abs=1e-4)
    assert abs(likelihood(new, spelled) - likelihood(new, question)) > 1e-3


def test_old_rag_checkpoints_give_answers_after_a_space(tmp_path: Path) -> None:
    name = tiny.save_rag(tmp_path, tiny.rag())
    old = load_generator(name)
    (tmp_path / "openbook.json").write_text('{"legacy": false}')
    new = load_generator(name)
    assert [each.tokenizer.decode(each.answer_ids("Warsaw")) for each in (old, new)] == [" Warsaw", "Warsaw"]
    assert old.text(old.answer_ids("Warsaw")) == "Warsaw"
    how, hits = GenerationSettings(labels=("yes", "no")), [_retrieved((MOON, 1.0))]
    (chosen,) = RagGenerator(old, GeneratorSettings()).generate(["is it?"], hits, how)
    assert chosen.text in how.labels
    assert chosen.token_ids == (*old.answer_ids(chosen.text), 2)


@settings(max_examples=40)
@given(
    question=st.text("ab ?é", max_size=60).map(lambda text: " ".join(text.split())),
    text=st.text("xyz é", max_size=80).map(lambda text: " ".join(text.split())),
    reads=st.sampled_from([RagFormat(48), PairFormat(48)]),
)
def test_whatever_the_length_the_question_is_read_whole_or_refused(
    question: str, text: str, reads: RagFormat | PairFormat
) -> None:
    passage = replace(MOON, text=text)
    (whole,) = replace(reads, max_tokens=10_000).encode(tiny.byte_tokenizer(), question, [passage])
    try:
        (ids,) = reads.encode(tiny.byte_tokenizer(), question, [passage])
    except InvalidRequest:
        assert len(question.encode()) > 40
        return
    assert question in tiny.byte_tokenizer().decode(ids)
    # Cut no more than must be: é is two bytes, and a space that then ends the passage joins the one behind it.
    assert ids == whole if len(whole) <= 48 else 46 <= len(ids) <= 48


def _assert_equal(ours: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)
        assert one.log_prior == pytest.approx(other.log_prior)
        assert one.log_posterior == pytest.approx(other.log_posterior, abs=1e-4)


@pytest.mark.parametrize("formulation", list(Formulation))
def test_labels_are_weighed_against_each_other(formulation: Formulation) -> None:
    labels = ["alexander graham bell", "marie curie", "warsaw"]
    questions, retrieved = zip(TELEPHONE, BIRTH, strict=True)
    telephone, birth = _reader().classify(questions, retrieved, labels, formulation)
    assert (telephone.label, birth.label) == ("alexander graham bell", "warsaw")
    for classification, each in zip((telephone, birth), retrieved, strict=True):
        assert classification.labels == tuple(labels)
        assert np.exp(classification.log_probability).sum() == pytest.approx(1)
        np.testing.assert_allclose(np.ptp(classification.log_likelihood - classification.log_probability), 0, atol=1e-9)
        np.testing.assert_allclose(np.exp(classification.log_posterior).sum(1), 1)
        np.testing.assert_allclose(classification.log_prior, log_prior(each.scores[None].astype(np.float64))[0])
    generated = _reader().generate(*zip(BIRTH, strict=True), GREEDY_TOKEN)[0]
    if formulation is Formulation.TOKEN:  # it is the answer that greedy decoding found
        assert birth.log_likelihood[2] == pytest.approx(generated.log_likelihood, abs=1e-4)


def test_labels_of_one_token_have_no_end_of_sequence() -> None:
    one, several = (
        _reader().classify([BIRTH[0]], [BIRTH[1]], labels, Formulation.SEQUENCE)[0]
        for labels in (["warsaw", "paris"], ["warsaw", "new york"])
    )
    assert one.log_likelihood[0] > several.log_likelihood[0]


@pytest.mark.parametrize("formulation", list(Formulation))
def test_generation_out_of_labels_gives_the_most_probable_one_whatever_else_is_asked(formulation: Formulation) -> None:
    how = GenerationSettings(formulation=formulation, temperature=2.0, labels=("Alexander Graham Bell", "Warsaw"))
    pair = zip(TELEPHONE, BIRTH, strict=True)
    questions, retrieved = next(pair), next(pair)
    found = _reader().generate(questions, retrieved, how)
    assert [each.text for each in found] == [
        "Alexander Graham Bell",
        "Warsaw",
    ]  # as given, not as the tokenizer spells it
    for best, each in enumerate(found):
        [wanted] = _reader().classify([questions[best]], [retrieved[best]], how.labels, formulation)
        assert each.classification is not None
        assert each.classification.labels == how.labels
        np.testing.assert_allclose(each.classification.log_probability, wanted.log_probability, atol=1e-4)
        assert each.log_likelihood == pytest.approx(wanted.log_likelihood[best], abs=1e-4)
        np.testing.assert_allclose(each.log_posterior, wanted.log_posterior[best], atol=1e-4)
        assert sum(token.log_likelihood for token in each.tokens) == pytest.approx(each.log_likelihood, abs=1e-9)
        assert "".join(each.text[token.start : token.end] for token in each.tokens) == each.text.replace(" ", "")
        streamed = list(_reader().stream(questions[best], retrieved[best], how))
        assert [item.text for item in streamed] == [how.labels[best]]
        assert isinstance(streamed[0], Generation)


def test_a_small_bound_on_memory_changes_no_classification(encoded: list[int]) -> None:
    pair = zip(TELEPHONE, BIRTH, strict=True)
    arguments = (next(pair), next(pair), ["bell", "warsaw"], Formulation.SEQUENCE)
    for one, other in zip(_one_by_one().classify(*arguments), _reader().classify(*arguments), strict=True):
        np.testing.assert_allclose(one.log_likelihood, other.log_likelihood, atol=1e-4)
    assert len(encoded) == 2 + 1


@pytest.mark.parametrize("formulation", [Formulation.TOKEN, Formulation.SEQUENCE])
def test_an_answer_ends_where_the_decoder_has_no_more_positions(formulation: Formulation) -> None:
    endless = GenerationSettings(formulation=formulation, n_beams=1, max_new_tokens=140, min_new_tokens=140)
    (answer,) = _babbler().generate([BIRTH[0]], [BIRTH[1]], endless)
    *_, streamed = _babbler().stream(*BIRTH, endless)
    assert isinstance(streamed, Generation)
    assert len(answer.tokens) == len(streamed.tokens) == tiny.bart().config.max_position_embeddings == 128
    assert answer.ended
    of_t5 = RagGenerator(GeneratorCheckpoint(tiny.t5(), tiny.byte_tokenizer(), RagFormat(128)), GeneratorSettings())
    (answer,) = of_t5.generate([BIRTH[0]], [BIRTH[1]], endless)
    assert (len(answer.tokens), answer.ended) == (140, False)  # its positions are relative


def test_an_answer_has_ended_with_its_end_of_sequence() -> None:
    (whole,) = _reader().generate([BIRTH[0]], [BIRTH[1]], GREEDY_TOKEN)
    n = len(whole.tokens)
    for n_tokens in (n, n - 1):
        (found,) = _reader().generate([BIRTH[0]], [BIRTH[1]], replace(GREEDY_TOKEN, max_new_tokens=n_tokens))
        assert (len(found.tokens), found.ended) == (n_tokens, n_tokens == n)


@pytest.mark.parametrize("forced", [False, True])
def test_an_answer_is_cut_where_it_may_be_no_longer_and_has_not_ended_by_itself(forced: bool) -> None:
    """Whether an end that is forced would have come anyway, nobody looks."""
    bart = tiny.bart()
    end = bart.config.eos_token_id
    bart.config.forced_eos_token_id = bart.generation_config.forced_eos_token_id = end if forced else None
    reader = RagGenerator(GeneratorCheckpoint(bart, tiny.byte_tokenizer(), RagFormat(128)), GeneratorSettings())
    cut = replace(GREEDY_TOKEN, max_new_tokens=3, min_new_tokens=2)
    several = replace(cut, formulation=Formulation.SEQUENCE, n_beams=2, n_answers=2)
    *_, streamed = reader.stream(*BIRTH, cut)
    assert isinstance(streamed, Generation)
    for each in (streamed, *reader.generate([BIRTH[0]], [BIRTH[1]], several)[0].several):
        assert each.cut == (len(each.token_ids) == 3 and (forced or each.token_ids[-1] != end))
    assert streamed.cut
    assert not reader.generate([BIRTH[0]], [BIRTH[1]], replace(cut, labels=("no", "ab")))[0].cut


def test_a_label_longer_than_an_answer_may_be_is_refused() -> None:
    how = GenerationSettings(labels=("yes", "no " * 40), max_new_tokens=16)
    with pytest.raises(InvalidRequest, match="labels must have at most max_new_tokens = 16 tokens, got 41 in 'no no"):
        _reader().generate([BIRTH[0]], [BIRTH[1]], how)
    how = GenerationSettings(labels=("yes", "no " * 60), max_new_tokens=140)
    full = "labels must have at most the generator's positions = 128 tokens, got 181 in 'no no"
    with pytest.raises(InvalidRequest, match=full):
        _babbler().generate([BIRTH[0]], [BIRTH[1]], how)
    with pytest.raises(InvalidRequest, match=full):
        _babbler().classify([BIRTH[0]], [BIRTH[1]], how.labels, Formulation.TOKEN)


@pytest.mark.parametrize("labels", [[], ["yes", ""], ["yes", "yes"], ["yes", "\ud800"]])
def test_labels_that_leave_no_choice_are_refused(labels: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=r"labels must be (1..256 different texts, none empty|UTF-8 text), got"):
        _reader().classify([BIRTH[0]], [BIRTH[1]], labels, Formulation.TOKEN)


@pytest.mark.parametrize("labels", [["yes", "YES"], ["yes", "\N{ZERO WIDTH SPACE}"]])
def test_labels_alike_to_the_tokenizer_are_refused(labels: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="labels must differ in their tokens, and none have none"):
        _reader().classify([BIRTH[0]], [BIRTH[1]], labels, Formulation.TOKEN)


@pytest.mark.parametrize("how", ALL_SETTINGS)
@pytest.mark.parametrize("generator", [_reader, _babbler])
def test_every_token_says_how_likely_it_was_where_it_stands_and_which_passages_it_rests_on(
    how: GenerationSettings, generator: Callable[[], RagGenerator]
) -> None:
    for each in generator().generate(*zip(TELEPHONE, BIRTH, strict=True), how):
        shares = np.exp([token.log_posterior for token in each.tokens])
        assert shares.shape == (len(each.token_ids), len(each.log_prior))
        np.testing.assert_allclose(shares.sum(1), 1, atol=1e-9)
        assert sum(token.log_likelihood for token in each.tokens) == pytest.approx(each.log_likelihood, abs=1e-9)
        if how.formulation is Formulation.SEQUENCE:  # it draws one passage for all of its tokens
            assert each.tokens[-1].log_posterior == tuple(each.log_posterior)
        else:
            np.testing.assert_allclose(shares.mean(0), np.exp(each.log_posterior), atol=1e-9)
        parts = [each.text[token.start : token.end] for token in each.tokens]
        assert "".join("".join(parts).split()) == "".join(each.text.split())
        said = "".join(token.text for token in each.tokens)
        assert said == (each.text.lower() if generator is _reader else each.text)


@pytest.mark.parametrize(
    "how", [GREEDY_TOKEN, replace(ALL_SETTINGS[0], n_answers=2), replace(GREEDY_TOKEN, labels=("Bell", "Warsaw"))]
)
def test_a_generation_that_is_kept_keeps_nothing_else_of_its_batch(how: GenerationSettings) -> None:
    for each in _reader().generate(*zip(TELEPHONE, BIRTH, strict=True), how):
        kept = [value for one in each.several for value in (one.log_prior, one.log_posterior)]
        if chosen := each.classification:
            kept += [chosen.log_likelihood, chosen.log_probability, chosen.log_prior, chosen.log_posterior]
        assert all(value.base is None for value in kept)


def test_several_answers_come_best_first_and_the_first_is_the_one_that_comes_alone() -> None:
    pair = list(zip(TELEPHONE, BIRTH, strict=True))
    for how in (ALL_SETTINGS[0], ALL_SETTINGS[2]):
        alone = _reader().generate(*pair, how)
        several = _reader().generate(*pair, replace(how, n_answers=3))
        for one, found in zip(alone, several, strict=True):
            _assert_equal([found], [one])
            assert len({each.token_ids for each in found.several}) == len(found.several) == 3
            assert not any(each.others for each in found.others)
            if how.formulation is Formulation.SEQUENCE:
                likelihoods = [each.log_likelihood for each in found.several]
                assert likelihoods == sorted(likelihoods, reverse=True)
    drawn = GenerationSettings(formulation=Formulation.TOKEN, temperature=1.0, seed=3, n_answers=4)
    samples = _reader().generate([TELEPHONE[0]], [TELEPHONE[1]], drawn)[0].several
    assert len(samples) == 4
    _assert_equal(samples[:1], _reader().generate([TELEPHONE[0]], [TELEPHONE[1]], replace(drawn, n_answers=1)))
    [only] = list(_reader().stream(*TELEPHONE, drawn))
    assert isinstance(only, Generation)
    assert [each.text for each in only.several] == [each.text for each in samples]


def test_of_many_answers_the_check_is_looked_at_between_two_and_each_passage_is_read_once_for_its_spelling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    read: list[str] = []
    generate_several = decoding.generate_several

    def counted(text: str) -> Letters:
        read.append(text)
        return letters_of(text)

    def decoded(*given: Any, **options: Any) -> Any:
        found = generate_several(*given, **options)
        events.clear()
        return found

    monkeypatch.setattr(generator_module, "letters_of", counted)
    monkeypatch.setattr(decoding, "generate_several", decoded)
    drawn = GenerationSettings(formulation=Formulation.TOKEN, temperature=1.0, seed=3, n_answers=4)
    [found] = _reader().generate([TELEPHONE[0]], [TELEPHONE[1]], drawn, lambda: events.append("checks"))
    assert len(events) == len(found.several) == 4
    assert len(read) == len(set(read)) > 0
