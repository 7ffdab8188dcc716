"""What transformers' RAG classes do, and what we do: the tests behind the table in docs/decoding.md, one per row.

Each holds both sides. Where a test's first half fails, transformers has changed, and the row with it.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints
import tiny_models as tiny
import torch
from identity import answers, arguments
from torch import Tensor, nn
from transformers import RagConfig, RagRetriever, RagSequenceForGeneration, RagTokenForGeneration
from transformers.models.rag.retrieval_rag import HFIndexBase

from openbook.config import GeneratorSettings
from openbook.core import marginal as paper
from openbook.core.types import Decoding, Formulation, GenerationSettings, Passage, Retrieved
from openbook.models import marginal
from openbook.models.checkpoint import GeneratorCheckpoint
from openbook.models.decoding import generate, generate_several
from openbook.models.formats import RagFormat
from openbook.models.generator import RagGenerator
from openbook.models.seq2seq import SpecialTokens

SPECIAL = SpecialTokens(tiny.EOS, (tiny.EOS,), tiny.PAD)
SEQUENCE, TOKEN = Formulation.SEQUENCE, Formulation.TOKEN
HOW = GenerationSettings(n_beams=2, max_new_tokens=6, min_new_tokens=2)
KINDS = {SEQUENCE: RagSequenceForGeneration, TOKEN: RagTokenForGeneration}
Inputs = tuple[Tensor, Tensor, Tensor]  # context ids and mask (n * k, l), scores (n, k)


def _inputs(seed: int, n: int, k: int) -> Inputs:
    return *tiny.contexts(seed, n * k), tiny.scores(seed, n, k)


def _generate(rag: Any, inputs: Inputs, settings: GenerationSettings = HOW, **options: Any) -> list[tuple[int, ...]]:
    ids, mask, scores = inputs
    options = arguments(settings, SPECIAL) | options
    return answers(rag.generate(context_input_ids=ids, context_attention_mask=mask, doc_scores=scores, **options))


def _ours(model: Any, inputs: Inputs, settings: GenerationSettings = HOW) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in generate(model, *inputs, settings)]


def _loss(rag: Any, inputs: Inputs, labels: list[list[int]], **options: Any) -> Tensor:
    ids, mask, scores = inputs
    options = {"context_input_ids": ids, "context_attention_mask": mask, "doc_scores": scores, **options}
    with torch.no_grad():
        loss: Tensor = rag(labels=torch.tensor(labels), **options).loss.flatten()
    return loss


def _log_p(model: Any, inputs: Inputs, labels: list[list[int]], how: Formulation, *special: SpecialTokens) -> Tensor:
    with torch.no_grad():
        return marginal.log_likelihood(model, *inputs, torch.tensor(labels), how, *special)


def _per_passage(model: Any, inputs: Inputs, answer: list[int]) -> Tensor:
    """(k, t, v) log p(. | x, z, y_<t) of one question, the plain way."""
    ids, mask, _ = inputs
    decoder = torch.tensor([[tiny.EOS, *answer[:-1]]]).expand(len(ids), -1)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder).logits
    return logits.log_softmax(-1)


def test_proposals_attend_to_padding() -> None:
    """RagSequence.generate hands its generator no attention mask: more padding, other answers."""
    model, n_changed = tiny.bart(), 0
    rag = tiny.rag(RagSequenceForGeneration, model, 3)
    for seed in range(20):
        inputs = _inputs(seed, 1, 3)
        wider = (
            nn.functional.pad(inputs[0], (0, 9), value=tiny.PAD),
            nn.functional.pad(inputs[1], (0, 9)),
            inputs[2],
        )
        n_changed += _generate(rag, inputs) != _generate(rag, wider)
        assert _ours(model, inputs) == _ours(model, wider)
    assert n_changed >= 5


def test_the_prior_is_lost_without_a_second_target_token() -> None:
    """RagSequence adds it to that token. A label of one token, or an empty answer, has none."""
    model, answer = tiny.bart(), [tiny.EOS]
    rag, inputs = tiny.rag(RagSequenceForGeneration, model, 3), _inputs(0, 1, 3)
    others = (*inputs[:2], inputs[2].flip(1))
    likelihood = _per_passage(model, inputs, answer)[:, 0, tiny.EOS]
    lost = -likelihood.logsumexp(0, keepdim=True)
    torch.testing.assert_close(_loss(rag, inputs, [[tiny.EOS, *answer]]), lost)
    torch.testing.assert_close(_loss(rag, others, [[tiny.EOS, *answer]]), lost)
    for each in (inputs, others):
        right = (each[2].log_softmax(-1)[0] + likelihood).logsumexp(0, keepdim=True)
        torch.testing.assert_close(_log_p(model, each, [answer], SEQUENCE), right)


def test_label_smoothing_counts_the_prior_once_per_vocabulary_entry() -> None:
    model, answer, epsilon = tiny.bart(), [11, tiny.EOS], 0.1
    rag, inputs = tiny.rag(RagSequenceForGeneration, model, 2), _inputs(1, 1, 2)
    rag.config.label_smoothing = epsilon
    log_prior, log_p = inputs[2].log_softmax(-1)[0], _per_passage(model, inputs, answer)

    def smoothed(n_priors: int) -> Tensor:
        likelihood = log_p[:, range(2), answer].sum(-1)
        everything = log_p.sum((1, 2)) + n_priors * log_prior
        uniform = epsilon / tiny.VOCABULARY * everything.logsumexp(0, keepdim=True)
        return -(1 - epsilon) * (log_prior + likelihood).logsumexp(0, keepdim=True) - uniform

    theirs = _loss(rag, inputs, [[tiny.EOS, *answer]])
    torch.testing.assert_close(theirs, smoothed(tiny.VOCABULARY))
    assert not torch.allclose(theirs, smoothed(1), atol=0.01)
    model.config.label_smoothing = epsilon
    torch.testing.assert_close(
        _log_p(model, inputs, [answer], SEQUENCE), (log_prior + log_p[:, range(2), answer].sum(-1)).logsumexp(0)[None]
    )


def test_label_smoothing_leaks_into_decoding() -> None:
    model, inputs = tiny.bart(), _inputs(2, 10, 3)
    rag = tiny.rag(RagSequenceForGeneration, model, 3)
    plain, ours = _generate(rag, inputs), _ours(model, inputs)
    for config in (rag.config, model.config):
        config.label_smoothing = 0.9
    assert _generate(rag, inputs) != plain
    assert _ours(model, inputs) == ours


@pytest.mark.parametrize("formulation", Formulation)
def test_padded_labels_crash(formulation: Formulation) -> None:
    model, inputs = tiny.bart(), _inputs(3, 2, 2)
    rag = tiny.rag(KINDS[formulation], model, 2)
    with pytest.raises((IndexError, RuntimeError)):
        _loss(rag, inputs, [[tiny.EOS, 11, tiny.EOS], [tiny.EOS, 12, -100]])
    both = _log_p(model, inputs, [[11, 13, tiny.EOS], [12, tiny.EOS, -100]], formulation)
    second = (inputs[0][2:], inputs[1][2:], inputs[2][1:])
    torch.testing.assert_close(both[1:], _log_p(model, second, [[12, tiny.EOS]], formulation))


def test_max_new_tokens_is_ignored_by_rag_token() -> None:
    model, inputs = tiny.bart(), _inputs(4, 1, 2)
    model.final_logits_bias[0, tiny.EOS] = -1e4
    rag, settings = tiny.rag(RagTokenForGeneration, model, 2), replace(HOW, formulation=TOKEN)
    assert len(_generate(rag, inputs, settings)[0]) > HOW.max_new_tokens
    assert len(_ours(model, inputs, settings)[0]) == HOW.max_new_tokens


def test_rag_token_samples_one_sequence_however_many_are_asked_for() -> None:
    model, inputs = tiny.bart(), _inputs(5, 1, 2)
    rag, settings = tiny.rag(RagTokenForGeneration, model, 2), replace(HOW, formulation=TOKEN, n_beams=1)
    assert len(_generate(rag, inputs, settings, do_sample=True, num_return_sequences=3)) == 1
    [several] = generate_several(model, *inputs, replace(settings, temperature=1.0), 3)
    assert len({answer.token_ids for answer in several}) == 3


def test_more_sequences_than_candidates_crash() -> None:
    model, inputs = tiny.bart(), _inputs(6, 1, 1)
    rag, settings = tiny.rag(RagSequenceForGeneration, model, 1), replace(HOW, n_beams=1)
    with pytest.raises(RuntimeError, match="out of range"):
        _generate(rag, inputs, settings, num_return_sequences=2)
    [found] = generate_several(model, *inputs, settings, 2)
    assert len(found) == 1


def test_another_number_of_passages_at_generation_time_crashes() -> None:
    model, inputs = tiny.bart(), _inputs(7, 2, 3)
    with pytest.raises((AssertionError, RuntimeError)):
        _generate(tiny.rag(RagSequenceForGeneration, model, 2), inputs, n_docs=3)
    assert len(_ours(model, inputs)) == 2


def test_rag_sequence_does_not_run_on_t5() -> None:
    """Its config has no BOS. `save_rag` writes one that is null, and then its loss can be computed."""
    model, inputs, answer = tiny.t5(), _inputs(8, 1, 2), [11, 12, tiny.EOS]
    del model.config.bos_token_id
    rag = tiny.rag(RagSequenceForGeneration, model, 2)
    for run in (lambda: _generate(rag, inputs), lambda: _loss(rag, inputs, [[tiny.EOS, *answer]])):
        with pytest.raises(AttributeError, match="bos_token_id"):
            run()
    likelihood = _per_passage(model, inputs, answer)[:, range(3), answer].sum(-1)
    right = (inputs[2].log_softmax(-1)[0] + likelihood).logsumexp(0, keepdim=True)
    torch.testing.assert_close(_log_p(model, inputs, [answer], SEQUENCE), right)
    assert _ours(model, inputs)


def test_the_first_token_is_left_out_of_a_candidates_score() -> None:
    """RagSequence.generate scores without BOS where the model has one: what the passages think of it does not count."""
    model, inputs, answer = tiny.bart(), _inputs(9, 1, 3), [tiny.BOS, 11, 12, tiny.EOS]
    rag = tiny.rag(RagSequenceForGeneration, model, 3)
    rag.config.generator.bos_token_id = tiny.BOS
    log_p = _per_passage(model, inputs, answer)[:, range(4), answer]
    log_prior = inputs[2].log_softmax(-1)[0]
    without = -(log_prior + log_p[:, 1:].sum(-1)).logsumexp(0, keepdim=True)
    torch.testing.assert_close(_loss(rag, inputs, [[tiny.EOS, *answer]], exclude_bos_score=True), without)
    whole = (log_prior + log_p.sum(-1)).logsumexp(0, keepdim=True)
    torch.testing.assert_close(_log_p(model, inputs, [answer], SEQUENCE), whole)
    steered = replace(SPECIAL, forced_bos=tiny.BOS)
    [found] = generate(model, *inputs, HOW, steered)
    torch.testing.assert_close(
        found.log_likelihood, float(_log_p(model, inputs, [list(found.token_ids)], SEQUENCE, steered))
    )


@pytest.mark.parametrize("formulation", Formulation)
def test_labels_from_the_tokenizer_start_the_decoder_elsewhere_than_generation_does(formulation: Formulation) -> None:
    """The loss feeds labels as they are. BART's tokenizer begins them with <s>; generation begins with </s>."""
    model, inputs, text = tiny.bart(), _inputs(10, 1, 3), [11, 12, tiny.EOS]
    theirs = -_loss(tiny.rag(KINDS[formulation], model, 3), inputs, [[tiny.BOS, *text]])
    begins_at_bos = replace(SPECIAL, decoder_start=tiny.BOS)
    torch.testing.assert_close(theirs, _log_p(model, inputs, [text], formulation, begins_at_bos))
    ours = _log_p(model, inputs, [[tiny.BOS, *text]], formulation)
    assert not torch.allclose(theirs, ours, atol=0.01)
    steered = replace(SPECIAL, forced_bos=tiny.BOS)
    [found] = generate(model, *inputs, replace(HOW, formulation=formulation), steered)
    assert found.token_ids[0] == tiny.BOS
    of_answer = _log_p(model, inputs, [list(found.token_ids)], formulation)
    torch.testing.assert_close(of_answer, torch.tensor([found.log_likelihood]).double())


@pytest.mark.parametrize("formulation", Formulation)
def test_a_pad_token_inside_an_answer_costs_nothing(formulation: Formulation) -> None:
    model, inputs, answer = tiny.bart(), _inputs(11, 1, 2), [11, tiny.PAD, 12, tiny.EOS]
    model.final_logits_bias.zero_()
    theirs = -_loss(tiny.rag(KINDS[formulation], model, 2), inputs, [[tiny.EOS, *answer]])
    ours = _log_p(model, inputs, [answer], formulation)
    log_p = _per_passage(model, inputs, answer)[:, range(4), answer].numpy()[None]
    prior, of = paper.log_prior(inputs[2].numpy()), (paper.sequence_log_marginal, paper.token_log_marginal)
    whole = of[formulation is TOKEN](prior, log_p, np.ones((1, 4)))
    np.testing.assert_allclose(ours.numpy(), whole)
    assert theirs > ours + 0.1


def test_the_beam_score_of_a_forced_end_is_no_likelihood() -> None:
    """A forced token counts as certain in the beam's score."""
    model, inputs = tiny.bart(), _inputs(12, 1, 1)
    model.final_logits_bias[0, tiny.EOS] = -5.0  # it would not end by itself
    settings = replace(HOW, formulation=TOKEN, max_new_tokens=3, length_penalty=0.0)  # of one passage: a plain search
    special = replace(SPECIAL, forced_eos=tiny.EOS)
    options = arguments(settings, special) | {"return_dict_in_generate": True, "output_scores": True}
    found = model.generate(inputs[0], attention_mask=inputs[1], **options)
    [answer] = answers(found.sequences)
    true = _per_passage(model, inputs, list(answer))[0, range(3), answer]
    assert found.sequences_scores.tolist() == pytest.approx([float(true[:2].sum())], abs=1e-5)
    [ours] = generate(model, *inputs, settings, special)
    assert ours.token_ids == answer
    assert ours.log_likelihood == pytest.approx(float(true.sum()))
    assert ours.log_likelihood < float(found.sequences_scores) - 1


def test_bfloat16_log_probabilities_are_rounded() -> None:
    """transformers normalises in the dtype of the model, we in float32 whatever the model computes in."""
    model, inputs = tiny.bart().bfloat16(), _inputs(13, 1, 1)
    narrow = (*inputs[:2], inputs[2].bfloat16())
    rag, far, near = tiny.rag(RagSequenceForGeneration, model, 1).bfloat16(), [], []
    for first in range(10, 20):
        answer = [first, 12, 13, tiny.EOS]
        decoder = torch.tensor([[tiny.EOS, *answer[:-1]]])
        with torch.no_grad():
            logits = model(input_ids=inputs[0], attention_mask=inputs[1], decoder_input_ids=decoder).logits
        exact = logits.double().log_softmax(-1)[0, range(4), answer].sum()
        far.append(abs(float(-_loss(rag, narrow, [[tiny.EOS, *answer]]) - exact)))
        near.append(abs(float(_log_p(model, narrow, [answer], SEQUENCE) - exact)))
    assert max(far) > 0.025
    assert np.mean(near) < np.mean(far)


def test_there_is_no_fast_decoding() -> None:
    model, inputs = tiny.bart(), _inputs(14, 40, 4)
    full = (inputs[0], torch.ones_like(inputs[1]), inputs[2])  # no padding, hence no mask to be missed
    theirs = _generate(tiny.rag(RagSequenceForGeneration, model, 4), full)
    assert theirs == _ours(model, full) != _ours(model, full, replace(HOW, decoding=Decoding.FAST))


def _rows(layer: nn.Module) -> list[int]:
    """Grows by the number of rows of every call."""
    seen: list[int] = []
    layer.register_forward_pre_hook(lambda _layer, inputs: seen.append(len(inputs[0])))
    return seen


def test_questions_are_taken_one_by_one_and_passages_encoded_for_every_candidate() -> None:
    model, n, k = tiny.bart(), 3, 4
    inputs, rows = (
        _inputs(15, n, k),
        _rows(model.model.encoder.layers[0].fc1),
    )
    theirs = _generate(tiny.rag(RagSequenceForGeneration, model, k), inputs)
    assert len(rows) == 2 * n, "a search and a scoring pass for each"
    assert sum(rows) > 2 * n * k
    rows.clear()
    assert len(_ours(model, inputs)) == len(theirs)
    assert rows == [n * k]


def test_the_encoder_states_are_copied_per_beam() -> None:
    model, n, k, b = tiny.bart(), 2, 3, 4
    inputs, settings = _inputs(16, n, k), replace(HOW, formulation=TOKEN, n_beams=b)
    rows = _rows(model.model.decoder.layers[0].encoder_attn.k_proj)
    _generate(tiny.rag(RagTokenForGeneration, model, k), inputs, settings)
    assert rows == [n * k * b]
    rows.clear()
    _ours(model, inputs, settings)
    assert rows == [n * k]


PASSAGE = Passage(0, "a", '"Telephone"', "alexander graham bell invented the telephone")


def _retriever(**parts: Any) -> Any:
    """What of RagRetriever needs no index: its methods run on this in its place."""
    tokenizer = tiny_checkpoints.byte_tokenizer()
    retriever = SimpleNamespace(
        config=RagConfig(max_combined_length=100), generator_tokenizer=tokenizer, n_docs=1, return_tokenized_docs=False
    )
    vars(retriever).update(parts)
    return retriever


def _read(question: str, text: str) -> Tensor:
    """Ids as transformers makes them."""
    docs = [{"title": [PASSAGE.title], "text": [text]}]
    ids: Tensor = RagRetriever.postprocess_docs(_retriever(), docs, [question], None, 1, return_tensors="pt")[0]
    return ids


def _encode(question: str, text: str) -> list[int]:
    return RagFormat(100).encode(tiny_checkpoints.byte_tokenizer(), question, [replace(PASSAGE, text=text)])[0]


def test_contexts_are_padded_to_the_greatest_length() -> None:
    theirs, ours = _read("who?", PASSAGE.text)[0].tolist(), _encode("who?", PASSAGE.text)
    assert len(theirs) == 100
    assert ours == [token for token in theirs if token != tiny.PAD]


def test_what_does_not_fit_is_cut_off_the_question() -> None:
    question, text = "who invented the telephone?", "bell " * 40
    decode: Callable[[Any], str] = tiny_checkpoints.byte_tokenizer().decode
    assert question not in decode(_read(question, text)[0])
    assert question in decode(_encode(question, text))


def test_the_question_is_rebuilt_from_lower_cased_tokens() -> None:
    """Checkpoints that were trained on that are still read so (`"legacy"` in their declaration), but with the spaces
    cleaned up, as transformers did until version 5.
    """
    question, seen = "Who's the president?", []

    def postprocess(docs: Any, strings: list[str], *_args: Any, **_options: Any) -> tuple[None, None]:
        seen.extend(strings)
        return None, None

    words = tiny_checkpoints.word_tokenizer()
    retriever = _retriever(
        question_encoder_tokenizer=words,
        postprocess_docs=postprocess,
        retrieve=lambda _states, _n: (np.zeros((1, 1, 2)), np.zeros((1, 1), np.int64), [{}]),
    )
    RagRetriever.__call__(retriever, words([question])["input_ids"], np.zeros((1, 2), np.float32))
    assert seen == ["who ' s the president?"]
    decode: Callable[[Any], str] = tiny_checkpoints.byte_tokenizer().decode
    assert question in decode(_encode(question, PASSAGE.text))


def test_a_missing_hit_becomes_the_last_passage_with_score_zero() -> None:
    class Dataset:
        """Two passages, of which the index finds one."""

        texts = ("found", "last")

        def search_batch(self, *_args: Any) -> tuple[Any, Any]:
            return np.array([[-3.0, -np.inf]]), np.array([[0, -1]])

        def __getitem__(self, ids: list[int]) -> dict[str, Any]:
            return {"text": [self.texts[i] for i in ids], "embeddings": np.full((len(ids), 2), -1.5)}

    index = SimpleNamespace(dataset=Dataset(), vector_size=2)
    ids, vectors = HFIndexBase.get_top_docs(index, np.ones((1, 2)), 2)
    [documents] = HFIndexBase.get_doc_dicts(index, ids)
    scores = np.ones(2) @ vectors[0].T
    assert (documents["text"], scores.tolist()) == (["found", "last"], [-3.0, 0.0])
    assert np.exp(paper.log_prior(scores)).round(2).tolist() == [0.05, 0.95]

    one = Retrieved((PASSAGE,), np.array([-3.0], np.float32), "snapshot")
    two = Retrieved((PASSAGE, PASSAGE), np.array([-1.0, -1.0], np.float32), "snapshot")
    checkpoint = GeneratorCheckpoint(tiny_checkpoints.bart(), tiny_checkpoints.byte_tokenizer(), RagFormat(100))
    reader = RagGenerator(checkpoint, GeneratorSettings())
    beside, _ = reader.generate(["who?"] * 2, [one, two], HOW)  # in a batch where the other has two
    assert beside.log_prior == pytest.approx([0.0], abs=1e-12)  # a logsumexp of one, whatever NumPy's exp and log round
    assert beside.log_likelihood == pytest.approx(reader.generate(["who?"], [one], HOW)[0].log_likelihood, abs=1e-4)
