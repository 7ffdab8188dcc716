"""Decoding beside a slow reference that keeps no cache, pads nothing and asks one passage at a time."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models as tiny
import torch
from transformers import LongformerModel, MPNetModel
from transformers.modeling_utils import AttentionInterface
from transformers.models.t5 import modeling_t5

from openbook.core import marginal as paper
from openbook.core.types import Decoding, Formulation, GenerationSettings, PartSettings
from openbook.errors import InvalidModel, InvalidRequest
from openbook.models import decoding as under_test
from openbook.models.decoding import (
    Decoded,
    DecodedToken,
    Seq2Seq,
    SpecialTokens,
    generate,
    generate_several,
    score_answers,
    stream,
)
from openbook.models.marginal import label_log_likelihood
from openbook.models.search import _best

SPECIAL = SpecialTokens(tiny.EOS, (tiny.EOS,), tiny.PAD)
ARCHITECTURES = [tiny.bart, tiny.mbart, tiny.pegasus, tiny.t5, tiny.bert2bert]
Tokens = tuple[int, ...]


def _next(model: Any, ids: Any, mask: Any) -> Callable[[Tokens], Any]:
    """log p(next token | one context, the tokens so far), (v,)."""

    @cache
    def log_p(tokens: Tokens) -> Any:
        inputs = torch.tensor([[tiny.EOS, *tokens]])
        with torch.no_grad():
            logits = model(input_ids=ids[mask.bool()][None], decoder_input_ids=inputs).logits
        return logits[0, -1].log_softmax(-1).numpy()

    return log_p


def _search(log_p: Callable[[Tokens], Any], settings: GenerationSettings, special: SpecialTokens) -> list[Tokens]:
    def steered(tokens: Tokens) -> Any:
        values = log_p(tokens).copy()
        last = len(tokens) == settings.max_new_tokens - 1 and special.forced_eos is not None
        forced = special.forced_eos if last else special.forced_bos if not tokens else None
        if forced is not None:
            return np.where(np.arange(len(values)) == forced, 0.0, -np.inf)
        if len(tokens) < settings.min_new_tokens:
            values[list(special.eos)] = -np.inf
        return values

    if settings.n_beams == 1:
        answer: Tokens = ()
        while len(answer) < settings.max_new_tokens and not set(answer[-1:]) & set(special.eos):
            answer += (int(steered(answer).argmax()),)
        return [answer]
    b, running, done = settings.n_beams, [(0.0, ())], []
    for length in range(1, settings.max_new_tokens + 1):
        grown = [(s + v, (*y, t)) for s, y in running for t, v in enumerate(steered(y)) if v > -np.inf]
        ranked = sorted(grown, key=lambda pair: -pair[0])[: (1 + len(special.eos)) * b]
        ended = [length == settings.max_new_tokens or y[-1] in special.eos for _, y in ranked]
        norm = length**settings.length_penalty
        done += [(s / norm, y) for (s, y), end in zip(ranked[:b], ended, strict=False) if end]
        done = sorted(done, key=lambda pair: -pair[0])[:b]
        running = [pair for pair, end in zip(ranked, ended, strict=True) if not end][:b]
        full = len(done) == b
        if not running or (full and (settings.early_stopping or running[0][0] / norm <= done[-1][0])):
            break
    return [y for _, y in done]


def _reference(model: Any, ids: Any, mask: Any, scores: Any, settings: Any, special: Any) -> Decoded:
    """One question with no empty slot."""
    prior = paper.log_prior(scores.numpy())
    readers = [_next(model, row, row_mask) for row, row_mask in zip(ids, mask, strict=True)]

    def likelihood(y: Tokens) -> Any:
        return np.array([[log_p(y[:t])[y[t]] for t in range(len(y))] for log_p in readers])  # (k, t)

    def total(y: Tokens) -> Any:
        return likelihood(y).sum(-1)

    if settings.formulation is Formulation.TOKEN:
        answer = _search(
            lambda y: np.logaddexp.reduce([p + r(y) for p, r in zip(prior, readers, strict=True)]), settings, special
        )[0]
        one = likelihood(answer)[None]
        tokens = np.ones((1, len(answer)))
        posterior = paper.token_log_posterior(prior[None], one)
        log_p = paper.token_log_marginal(prior[None], one, tokens)[0]
        each = np.logaddexp.reduce(prior[:, None] + one[0])  # every token draws its own passage
        return Decoded(answer, log_p, prior, paper.answer_log_posterior(posterior, tokens)[0], each, posterior[0])
    proposed = [_search(reader, settings, special) for reader in readers]
    mass: dict[Tokens, Any] = {}
    for y in (y for proposals in proposed for y in proposals):
        counted = [settings.decoding is Decoding.THOROUGH or y in proposals for proposals in proposed]
        mass[y] = np.logaddexp.reduce(np.where(counted, prior + total(y), -np.inf))
    answer = max(mass, key=lambda y: mass[y])
    so_far = [prior + likelihood(answer[: t + 1]).sum(-1) for t in range(len(answer))]  # one passage for all of them
    whole = [np.logaddexp.reduce(joint) for joint in so_far]
    per_token = [joint - mass for joint, mass in zip(so_far, whole, strict=True)]
    each = [whole[0], *(after - before for before, after in pairwise(whole))]
    return Decoded(answer, whole[-1], prior, per_token[-1], np.array(each), np.array(per_token))


def _assert_same(got: Decoded, wanted: Decoded) -> None:
    assert got.token_ids == wanted.token_ids
    assert got.log_likelihood == pytest.approx(wanted.log_likelihood, abs=1e-9)
    np.testing.assert_allclose(got.log_prior, wanted.log_prior, atol=1e-9)
    np.testing.assert_allclose(got.log_posterior, wanted.log_posterior, atol=1e-9)
    np.testing.assert_allclose(got.token_log_likelihood, wanted.token_log_likelihood, atol=1e-9)
    np.testing.assert_allclose(got.token_log_posterior, wanted.token_log_posterior, atol=1e-9)


def _cases(n: int) -> Any:
    for case in range(n):
        settings = GenerationSettings(
            formulation=Formulation.TOKEN if case % 3 == 0 else Formulation.SEQUENCE,
            decoding=Decoding.FAST if case % 3 == 1 else Decoding.THOROUGH,
            n_beams=(1, 2, 4)[case // 3 % 3],
            length_penalty=(0.0, 1.0, 2.0, -1.0)[case % 4],
            early_stopping=case // 4 % 2 == 0,
            max_new_tokens=1 + case % 5,
            min_new_tokens=case // 2 % 2,
        )
        forced_bos = tiny.BOS if case % 5 == 0 else None
        forced_eos = tiny.EOS if case % 7 == 0 else None
        eos = (tiny.EOS, 7, 8, 9) if case % 4 == 1 else (tiny.EOS,)
        yield case, settings, replace(SPECIAL, eos=eos, forced_bos=forced_bos, forced_eos=forced_eos)


@pytest.mark.parametrize("build", ARCHITECTURES)
def test_answers_and_their_numbers_equal_a_slow_reference(build: Any) -> None:
    model = build()
    reader = Seq2Seq(model)
    for case, settings, special in _cases(72 if build is tiny.bart else 18):
        k = 1 + case % 4
        ids, mask = tiny.contexts(case, k, length=8)
        scores = tiny.scores(case, 1, k)
        [got] = generate(reader, ids, mask, scores, settings, special)
        _assert_same(got, _reference(model, ids, mask, scores[0], settings, special))


@pytest.mark.parametrize("build", ARCHITECTURES)
def test_folded_beams_equal_contexts_copied_per_beam(build: Any) -> None:
    model = build()
    folding, copying = Seq2Seq(model), Seq2Seq(model, fold=False)
    assert folding.folds
    assert not copying.folds
    for case, settings, special in _cases(12):
        ids, mask = tiny.contexts(case, 6)
        scores = tiny.scores(case, 2, 3)
        ours = generate(folding, ids, mask, scores, settings, special)
        for got, wanted in zip(ours, generate(copying, ids, mask, scores, settings, special), strict=True):
            _assert_same(got, wanted)


@pytest.mark.parametrize("build", [tiny.switch, tiny.nllb_moe])
def test_mixtures_of_experts_equal_a_slow_reference(build: Any) -> None:
    model = build()
    for case, settings, special in _cases(3):
        asked = *tiny.contexts(case, 3, length=8), tiny.scores(case, 1, 3)
        [got] = generate(model, *asked, settings, special)
        wanted = _reference(model, *asked[:2], asked[2][0], settings, special)
        assert got.token_ids == wanted.token_ids
        assert got.log_likelihood == pytest.approx(wanted.log_likelihood, abs=1e-6)  # routers compute in float32


@pytest.mark.parametrize("formulation", Formulation)
@pytest.mark.parametrize("build", [tiny.prophetnet, tiny.fsmt])
def test_decoders_that_take_one_token_beside_a_past_equal_a_slow_reference(
    build: Any, formulation: Formulation
) -> None:
    model = build()

    def step_by_step(input_ids: Any, decoder_input_ids: Any) -> Any:
        given = {"encoder_outputs": model.get_encoder()(input_ids=input_ids), "use_cache": True}
        output = SimpleNamespace(cache=None)
        for token in decoder_input_ids.split(1, 1):
            output = model(**given, decoder_input_ids=token, cache=output.cache)
        return output

    settings = GenerationSettings(formulation=formulation, n_beams=2, max_new_tokens=5, min_new_tokens=5)
    asked = *tiny.contexts(0, 2, length=8), tiny.scores(0, 1, 2)
    [got] = generate(model, *asked, settings)
    wanted = _reference(step_by_step, *asked[:2], asked[2][0], settings, SPECIAL)
    assert got.token_ids == wanted.token_ids
    np.testing.assert_allclose(got.token_log_likelihood, wanted.token_log_likelihood, atol=1e-4)
    if build is tiny.fsmt:  # the other one's numbers depend on how many tokens it is given at once
        [[scored]] = score_answers(model, *asked, [got.token_ids], formulation)
        np.testing.assert_allclose(scored.token_log_likelihood, got.token_log_likelihood, atol=1e-4)


@pytest.mark.parametrize("kind", [MPNetModel, LongformerModel])
def test_beams_fold_behind_an_encoder_that_attends_in_its_own_way(kind: Any) -> None:
    """Neither takes transformers' attention interface: their masks are numbers to add, and no booleans."""
    model = tiny.bert2bert(encoder=kind)
    folding, copying = Seq2Seq(model), Seq2Seq(model, fold=False)
    assert folding.folds
    asked = *tiny.contexts(0, 6), tiny.scores(0, 2, 3), GenerationSettings(n_beams=2, max_new_tokens=4)
    for got, wanted in zip(generate(folding, *asked), generate(copying, *asked), strict=True):
        _assert_same(got, wanted)


def test_beams_do_not_fold_where_the_decoder_attends_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As T5's did until transformers 5.14, which said so; folded, it was wrong without a word."""
    model, own = tiny.t5(), AttentionInterface()
    monkeypatch.setattr(own, "get_interface", lambda name, eager: eager)
    monkeypatch.setattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS", own)
    monkeypatch.setattr(modeling_t5.T5PreTrainedModel, "_can_set_attn_implementation", lambda *_: False)
    asked = *tiny.contexts(0, 6), tiny.scores(0, 2, 3), GenerationSettings(n_beams=2, max_new_tokens=4)
    for got, wanted in zip(generate(model, *asked), generate(Seq2Seq(model, fold=False), *asked), strict=True):
        _assert_same(got, wanted)


def test_no_question_depends_on_the_others_of_its_batch_nor_on_padding_or_empty_slots() -> None:
    reader = Seq2Seq(tiny.bart())
    for case, settings, special in _cases(24):
        n, k = 5, 4
        ids, mask = tiny.contexts(case, n * k)
        scores = tiny.scores(case, n, k)
        for question in range(n - 1):  # question q has q + 1 passages, the last all of them
            scores[question, question + 1 :] = -torch.inf
        ids[torch.isinf(scores).flatten()], mask[torch.isinf(scores).flatten()] = 9, 0
        together = generate(reader, ids, mask, scores, settings, special)
        in_parts = generate(reader, ids, mask, scores, settings, special, max_tokens=100)
        for question, (got, part) in enumerate(zip(together, in_parts, strict=True)):
            real = min(question + 1, k)
            rows = slice(question * k, question * k + real)
            length = int(mask[rows].sum(1).max())
            [alone] = generate(
                reader,
                ids[rows, :length],
                mask[rows, :length],
                scores[question : question + 1, :real],
                settings,
                special,
            )
            _assert_same(part, got)
            assert np.isneginf(got.log_prior[real:]).all()
            assert np.isneginf(got.log_posterior[real:]).all()
            _assert_same(
                replace(
                    got,
                    log_prior=got.log_prior[:real],
                    log_posterior=got.log_posterior[:real],
                    token_log_posterior=got.token_log_posterior[:, :real],
                ),
                alone,
            )


def test_vocabulary_and_scoring_in_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.bart()
    ids, mask = tiny.contexts(1, 12)
    scores = tiny.scores(1, 4, 3)
    for _, settings, special in _cases(12):
        whole = generate(model, ids, mask, scores, settings, special)
        with monkeypatch.context() as patch:
            for limit in ("search._MAX_LOGITS", "candidates._MAX_SCORED"):
                patch.setattr(f"openbook.models.{limit}", 7)
            patch.setattr("openbook.models.seq2seq._AT_ONCE", {"cpu": 11})
            patch.setattr("openbook.models.vocabulary._TILE", (3, 7))
            patch.setattr("openbook.models.search._BLOCK", 6)
            for got, wanted in zip(generate(model, ids, mask, scores, settings, special), whole, strict=True):
                _assert_same(got, wanted)


@pytest.mark.parametrize("n_tokens", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("n", [1, 8, 300])
def test_the_best_continuations_are_found_whatever_else_there_is(n_tokens: int, n: int) -> None:
    random = torch.Generator().manual_seed(n_tokens)
    log_p = torch.randint(-9, 0, (3, 4, n_tokens), generator=random).double()  # with many ties
    log_p[torch.rand(log_p.shape, generator=random) < 0.3] = -torch.inf
    running = torch.tensor([[0.0, -1, -2, -torch.inf]] * 3).double()
    score, index = _best(n, log_p, running)
    all_scores = (log_p + running[..., None]).flatten(1)
    assert torch.equal(score, all_scores.topk(min(n, 4 * n_tokens)).values)
    assert torch.equal(score, all_scores.gather(1, index))
    assert all(len(set(of_group)) == len(of_group) for of_group in index.tolist())


def test_giving_up_candidates_saves_work_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.bart()
    model.final_logits_bias[0, tiny.EOS] = -2.0  # long answers
    reader = Seq2Seq(model)
    n_scored: list[int] = []
    token_log_probs = Seq2Seq.token_log_probs

    def counting(self: Seq2Seq, states: Any, targets: Any) -> Any:
        n_scored[-1] += len(targets)
        return token_log_probs(self, states, targets)

    monkeypatch.setattr(Seq2Seq, "token_log_probs", counting)
    for case in range(8):
        ids, mask = tiny.contexts(case, 10)
        scores, settings = tiny.scores(case, 2, 5), GenerationSettings(n_beams=4, max_new_tokens=12)
        n_scored.append(0)
        pruned = generate_several(reader, ids, mask, scores, settings, 1 + case % 4)
        with monkeypatch.context() as patch:
            patch.setattr("openbook.models.candidates._MARGIN", math.inf)
            n_scored.append(0)
            whole = generate_several(reader, ids, mask, scores, settings, 1 + case % 4)
        for got, wanted in zip(chain(*pruned), chain(*whole), strict=True):
            _assert_same(got, wanted)
    assert sum(n_scored[::2]) < 0.8 * sum(n_scored[1::2])


def test_several_answers_are_distinct_and_in_order() -> None:
    model = tiny.bart()
    ids, mask = tiny.contexts(3, 3)
    scores = tiny.scores(3, 1, 3)
    settings = GenerationSettings(n_beams=4, max_new_tokens=4)
    [sequence] = generate_several(model, ids, mask, scores, settings, 100)
    proposals = {y for row, m in zip(ids, mask, strict=True) for y in _search(_next(model, row, m), settings, SPECIAL)}
    assert {answer.token_ids for answer in sequence} == proposals
    log_likelihoods = [answer.log_likelihood for answer in sequence]
    assert log_likelihoods == sorted(log_likelihoods, reverse=True)
    [two] = generate_several(model, ids, mask, scores, settings, 2)
    for got, wanted in zip(two, sequence[:2], strict=True):
        _assert_same(got, wanted)

    settings = replace(settings, formulation=Formulation.TOKEN, length_penalty=0.0)
    [token] = generate_several(model, ids, mask, scores, settings, 3)
    log_likelihoods = [answer.log_likelihood for answer in token]
    assert len({answer.token_ids for answer in token}) == 3
    assert log_likelihoods == sorted(log_likelihoods, reverse=True)  # without length penalty the same order
    _assert_same(token[0], generate(model, ids, mask, scores, settings)[0])


def test_an_empty_answer_keeps_its_prior() -> None:
    model = tiny.bart()
    model.final_logits_bias[0, tiny.EOS] = 50.0  # the answer is over at once
    ids, mask = tiny.contexts(1, 3)
    scores = tiny.scores(1, 1, 3)
    for n_beams in (1, 4):
        settings = GenerationSettings(n_beams=n_beams, max_new_tokens=4)
        [got] = generate(model, ids, mask, scores, settings)
        assert got.token_ids == (tiny.EOS,)
        _assert_same(got, _reference(model, ids, mask, scores[0], settings, SPECIAL))


@pytest.mark.parametrize("formulation", Formulation)
def test_more_beams_than_hypotheses_give_what_there_is(formulation: Formulation) -> None:
    model = tiny.bart()
    ids, mask = tiny.contexts(2, 2)
    for forced_eos in (None, tiny.EOS):
        settings = GenerationSettings(formulation=formulation, n_beams=32, max_new_tokens=1)
        special = replace(SPECIAL, forced_eos=forced_eos)
        [got] = generate(model, ids, mask, torch.zeros(1, 2), settings, special)
        _assert_same(got, _reference(model, ids, mask, torch.zeros(2), settings, special))


@pytest.mark.parametrize("formulation", Formulation)
def test_the_number_of_new_tokens_keeps_its_limits(formulation: Formulation) -> None:
    model = tiny.bart()
    model.final_logits_bias[0, tiny.EOS] = 4.0
    ids, mask = tiny.contexts(3, 8)
    lengths = set()
    for n_beams in (1, 4):
        settings = GenerationSettings(formulation=formulation, n_beams=n_beams, max_new_tokens=5, min_new_tokens=3)
        for answer in generate(model, ids, mask, torch.zeros(4, 2), settings):
            assert tiny.EOS not in answer.token_ids[:3]
            lengths.add(len(answer.token_ids))
    assert lengths <= {4, 5}


def test_forced_tokens_count_with_the_probability_the_model_gives_them() -> None:
    model = tiny.bart()
    ids, mask = tiny.contexts(4, 1)
    settings = GenerationSettings(formulation=Formulation.TOKEN, n_beams=1, max_new_tokens=2)
    [got] = generate(model, ids, mask, torch.zeros(1, 1), settings, replace(SPECIAL, forced_bos=7, forced_eos=tiny.EOS))
    log_p = _next(model, ids[0], mask[0])
    assert got.token_ids == (7, tiny.EOS)
    assert got.log_likelihood == pytest.approx(log_p(())[7] + log_p((7,))[tiny.EOS])
    assert got.log_likelihood < -1.0


@pytest.mark.parametrize("formulation", list(Formulation))
@pytest.mark.parametrize("forced_bos", [None, tiny.BOS])
def test_given_answers_are_scored_as_if_they_had_been_generated(
    formulation: Formulation, forced_bos: int | None
) -> None:
    model, ids, mask, scores = tiny.bart(), *tiny.contexts(16, 6), tiny.scores(16, 2, 3)
    special = replace(SPECIAL, forced_bos=forced_bos)
    settings = GenerationSettings(formulation=formulation, n_beams=4, max_new_tokens=4)
    for question, answers in enumerate(generate_several(model, ids, mask, scores, settings, 3, special)):
        scored = score_answers(model, ids, mask, scores, [y.token_ids for y in answers], formulation, special)
        for got, wanted in zip(scored[question], answers, strict=True):
            _assert_same(got, wanted)


def test_given_answers_without_the_forced_bos_are_read_after_it() -> None:
    model, ids, mask, scores = tiny.bart(), *tiny.contexts(17, 6), tiny.scores(17, 2, 3)
    scores[1, 2] = -torch.inf
    special = replace(SPECIAL, forced_bos=tiny.BOS)
    labels = [[11], [12]]
    for formulation in Formulation:
        wanted = label_log_likelihood(model, ids, mask, scores, labels, formulation, special).tolist()
        scored = score_answers(model, ids, mask, scores, labels, formulation, special)
        for question, of_question in enumerate(scored):
            assert [y.log_likelihood for y in of_question] == pytest.approx(wanted[question], abs=1e-9)
            assert [y.token_ids for y in of_question] == [(11,), (12,)]


def test_streaming_gives_the_tokens_and_numbers_of_the_whole() -> None:
    model = tiny.bart()
    ids, mask = tiny.contexts(5, 3)
    scores = torch.tensor([1.0, 2.0, -torch.inf])
    settings = GenerationSettings(formulation=Formulation.TOKEN, n_beams=1, max_new_tokens=8)
    *tokens, last = stream(model, ids, mask, scores, settings)
    assert isinstance(last, Decoded)
    _assert_same(last, generate(model, ids, mask, scores[None], settings)[0])
    deltas = [token for token in tokens if isinstance(token, DecodedToken)]
    assert len(deltas) == len(tokens)
    assert tuple(delta.token_id for delta in deltas) == last.token_ids
    assert sum(delta.log_likelihood for delta in deltas) == pytest.approx(last.log_likelihood)
    np.testing.assert_allclose([delta.log_posterior for delta in deltas], last.token_log_posterior)


HOW: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"min_new_tokens": 5}, {}, {"min_new_tokens": 3}]


@pytest.mark.parametrize(("make", "how"), list(zip(ARCHITECTURES, HOW, strict=True)))
def test_an_answer_in_parts_is_the_answer(make: Callable[[], Any], how: dict[str, Any]) -> None:
    model = make()
    ids, mask = tiny.contexts(8, 6)
    scores = torch.tensor([[1.0, 2.0, -torch.inf], [0.0, 0.5, 0.2]])
    settings = GenerationSettings(formulation=Formulation.TOKEN, n_beams=1, max_new_tokens=7, **how)
    whole = generate(model, ids, mask, scores, settings)
    for n_more in (1, 3, 20):
        for question, expected in enumerate(whole):
            part, rows = expected, slice(3 * question, 3 * question + 3)
            begun: Tokens | None = None
            while begun is None or part.token_ids != begun:
                begun = () if begun is None else part.token_ids
                so_far = PartSettings(**asdict(settings), begun=begun, n_more=n_more)
                [part] = generate(model, ids[rows], mask[rows], scores[question : question + 1], so_far)
                assert part.token_ids[: len(begun)] == begun
                assert len(part.token_ids) <= len(begun) + n_more
            assert part.token_ids == expected.token_ids
            np.testing.assert_allclose(part.token_log_likelihood, expected.token_log_likelihood, atol=1e-5)
            np.testing.assert_allclose(part.token_log_posterior, expected.token_log_posterior, atol=1e-4)


@pytest.mark.parametrize("settings", [GenerationSettings(n_beams=1), GenerationSettings(formulation=Formulation.TOKEN)])
def test_what_does_not_decide_token_by_token_streams_its_answer_alone(settings: GenerationSettings) -> None:
    model = tiny.bart()
    ids, mask = tiny.contexts(6, 2)
    [only] = stream(model, ids, mask, torch.zeros(2), settings)
    assert isinstance(only, Decoded)
    _assert_same(only, generate(model, ids, mask, torch.zeros(1, 2), settings)[0])


def test_the_model_is_left_as_it_was() -> None:
    model = tiny.bart().train()
    ids, mask = tiny.contexts(7, 2)
    first, second = (generate(model, ids, mask, torch.zeros(1, 2), GenerationSettings()) for _ in range(2))
    _assert_same(first[0], second[0])  # no dropout
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert model.get_output_embeddings().weight is model.model.shared.weight


def test_special_tokens_come_from_the_model() -> None:
    model = tiny.bart()
    model.generation_config.forced_bos_token_id = tiny.BOS
    assert SpecialTokens.of(model) == replace(SPECIAL, forced_bos=tiny.BOS)
    model.generation_config.eos_token_id = [2, 3]
    assert SpecialTokens.of(model).eos == (2, 3)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with pytest.raises(InvalidModel, match=r"needs decoder_start_token_id and eos_token_id, got 2 and \(\)"):
        SpecialTokens.of(model)


@pytest.mark.parametrize("n_beams", [1, 4])
def test_any_of_several_ends_ends_an_answer_as_in_transformers(n_beams: int) -> None:
    model = tiny.bart()
    eos, ended = [tiny.EOS, *range(30, 40)], set()
    for seed in range(12):
        ids, mask = tiny.contexts(seed, 1)
        options = {"num_beams": n_beams, "max_new_tokens": 6, "eos_token_id": eos, "pad_token_id": tiny.PAD}
        [theirs] = model.generate(ids, attention_mask=mask, decoder_start_token_id=tiny.EOS, **options).tolist()
        settings = GenerationSettings(Formulation.TOKEN, n_beams=n_beams, max_new_tokens=6)  # by the beam's own score
        [ours] = generate(model, ids, mask, torch.zeros(1, 1), settings, replace(SPECIAL, eos=tuple(eos)))
        assert list(ours.token_ids) == [token for token in theirs[1:] if token != tiny.PAD]
        ended.add(ours.token_ids[-1])
    assert len(ended & set(eos)) > 2


@pytest.mark.parametrize(
    ("rows", "scores", "message"),
    [
        (3, torch.zeros(2, 2), "context_ids must be"),
        (4, torch.full((2, 2), -torch.inf), "one passage or more"),
        (4, torch.zeros(4), "context_ids must be"),
    ],
)
def test_what_does_not_fit_is_refused(rows: int, scores: Any, message: str) -> None:
    ids, mask = tiny.contexts(8, rows)
    with pytest.raises(InvalidRequest, match=message):
        generate(tiny.bart(), ids, mask, scores, GenerationSettings())


def test_a_context_without_tokens_is_refused_unless_its_slot_is_empty() -> None:
    ids, mask = tiny.contexts(9, 2)
    mask[1] = 0
    with pytest.raises(InvalidRequest, match="context 1 has a score and no token"):
        generate(tiny.bart(), ids, mask, torch.zeros(1, 2), GenerationSettings())
    assert generate(tiny.bart(), ids, mask, torch.tensor([[0.0, -torch.inf]]), GenerationSettings())


def test_questions_are_taken_together_up_to_the_token_budget() -> None:
    mask = (torch.arange(10) < torch.tensor([[3], [9], [2], [2], [2], [2]])).long()
    prior = np.zeros((3, 2))
    assert list(under_test._batches(mask, prior, None)) == [(0, 3)]
    assert list(under_test._batches(mask, prior, 8)) == [(0, 1), (1, 3)]
    assert list(under_test._batches(mask, prior, 1)) == [(0, 1), (1, 2), (2, 3)]
    assert list(under_test._batches(mask, prior, 40)) == [(0, 2), (2, 3)]
    assert list(under_test._batches(mask, prior, 40, n_new=10)) == [(0, 1), (1, 2), (2, 3)]


def test_all_beams_count_in_the_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 questions x 2 passages x (12 + 3 beams x 4 tokens) = 96; with one beam 64."""
    sizes, encode = list[int](), Seq2Seq.encode

    def counted(self: Seq2Seq, ids: Any, mask: Any) -> Any:
        sizes.append(len(ids))
        return encode(self, ids, mask)

    monkeypatch.setattr(Seq2Seq, "encode", counted)
    ids, mask = tiny.contexts(0, 4)
    asked = ids, torch.ones_like(mask), tiny.scores(0, 2, 2)
    for n_beams in (3, 1):
        generate(tiny.bart(), *asked, GenerationSettings(n_beams=n_beams, max_new_tokens=4), max_tokens=90)
    assert sizes == [2, 2, 4]


def test_candidates_are_read_to_the_decoder_s_last_position_and_no_further() -> None:
    long, short = tiny.bart(), tiny.bart()
    n = short.config.max_position_embeddings = 10  # the encoder keeps all of its own
    places = short.get_decoder().embed_positions
    places.weight = torch.nn.Parameter(places.weight[: n + places.offset])
    settings = GenerationSettings(n_beams=3, max_new_tokens=n, min_new_tokens=n)
    inputs = (*tiny.contexts(0, 6), tiny.scores(0, 2, 3))
    for got, wanted in zip(generate(short, *inputs, settings), generate(long, *inputs, settings), strict=True):
        assert len(got.token_ids) == n
        _assert_same(got, wanted)
