"""Our answers beside those of transformers' RAG classes, where those are right.

The oracle is repaired in one place: its inner `generate` gets the attention mask that it forgets. BOS and label
smoothing are off, so that it scores whole answers, and every answer has two tokens, so that it does not lose the prior.
"""

from typing import Any

import pytest
import tiny_models as tiny
from transformers import RagSequenceForGeneration, RagTokenForGeneration

from openbook.core.types import Formulation, GenerationSettings
from openbook.models.decoding import Seq2Seq, SpecialTokens, generate

N_QUESTIONS, N_CASES = 4, 64  # 256 questions per formulation


@pytest.fixture(scope="module")
def generator() -> Any:
    return tiny.bart()


@pytest.fixture(scope="module")
def oracles(generator: Any) -> dict[Formulation, Any]:
    return {
        Formulation.SEQUENCE: tiny.rag(RagSequenceForGeneration, generator, 1),
        Formulation.TOKEN: tiny.rag(RagTokenForGeneration, generator, 1),
    }


def _theirs(
    rag: Any, ids: Any, mask: Any, scores: Any, settings: GenerationSettings, forced: dict[str, int | None]
) -> list[tuple[int, ...]]:
    """Answers without decoder start and padding."""
    n, k = scores.shape
    rag.config.n_docs = k
    options: dict[str, Any] = {
        "num_beams": settings.n_beams,
        "length_penalty": settings.length_penalty,
        "early_stopping": settings.early_stopping,
        "min_new_tokens": settings.min_new_tokens,
        "decoder_start_token_id": tiny.EOS,
        "pad_token_id": tiny.PAD,
        "eos_token_id": tiny.EOS,
        **forced,
    }
    if settings.formulation is Formulation.TOKEN:  # ignores max_new_tokens
        options["max_length"] = settings.max_new_tokens + 1
    else:
        options["max_new_tokens"] = settings.max_new_tokens
    original, question = rag.generator.generate, iter(range(n))

    def with_mask(inputs: Any, **kwargs: Any) -> Any:
        q = next(question)
        kwargs["attention_mask"] = mask[q * k : (q + 1) * k]
        return original(inputs, **kwargs)

    rag.generator.generate = with_mask
    try:
        rows = rag.generate(context_input_ids=ids, context_attention_mask=mask, doc_scores=scores, **options)
    finally:
        del rag.generator.generate
    answers = []
    for row in rows.tolist():
        answer = row[1:]
        while answer and answer[-1] == tiny.PAD:
            answer.pop()
        answers.append(tuple(answer))
    return answers


def _settings(case: int, formulation: Formulation) -> tuple[GenerationSettings, SpecialTokens]:
    """All combinations of what may interact, in turn."""
    forced_bos = case % 3 == 0
    settings = GenerationSettings(
        formulation=formulation,
        n_beams=(1, 4)[case % 2],
        length_penalty=(0.0, 1.0, 2.0)[case // 2 % 3],
        early_stopping=case // 6 % 2 == 0,
        max_new_tokens=3 + case % 6,
        min_new_tokens=0 if forced_bos else 2,
    )
    forced_eos = tiny.EOS if case % 4 == 0 else None
    return settings, SpecialTokens(tiny.EOS, tiny.EOS, tiny.PAD, tiny.BOS if forced_bos else None, forced_eos)


@pytest.mark.parametrize("formulation", Formulation)
def test_answers_agree_with_transformers(
    generator: Any, oracles: dict[Formulation, Any], formulation: Formulation
) -> None:
    reader = Seq2Seq(generator)
    distinct = set()
    for case in range(N_CASES):
        k = 1 + case % 10
        settings, special = _settings(case, formulation)
        ids, mask = tiny.contexts(case, N_QUESTIONS * k)
        scores = tiny.scores(case, N_QUESTIONS, k)
        ours = [answer.token_ids for answer in generate(reader, ids, mask, scores, settings, special)]
        forced = {"forced_bos_token_id": special.forced_bos, "forced_eos_token_id": special.forced_eos}
        theirs = _theirs(oracles[formulation], ids, mask, scores, settings, forced)
        assert ours == theirs, (case, settings, special)
        distinct |= set(ours)
    assert len(distinct) > N_CASES  # the contexts decide, so that agreement means something
