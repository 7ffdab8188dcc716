"""Retrieval that follows the answer: passages are looked for again as it grows.

    p(y|x) = prod_t sum_{z in Z_t} p(z|x,y_<t) p(y_t|x,z,y_<t)

After every n tokens the query encoder reads question and answer so far. Z_t is all that was found until then, and
p(z|x,y_<t) the softmax over it of the inner products with the latest query. Looked for once it is RAG-Token. Of an
answer that has become too long for the encoder it reads the last words.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from openbook.core.marginal import answer_log_posterior
from openbook.core.topk import canonical_scores
from openbook.core.types import (
    Coverage,
    Float32,
    Float64,
    Generation,
    GenerationSettings,
    PartSettings,
    Passage,
    Retrieved,
    Token,
)
from openbook.errors import InvalidRequest
from openbook.rag.own import joined
from openbook.rag.ports import BegunByAnother


@dataclass(frozen=True, slots=True)
class Found:
    """What was found for a text."""

    query: Float32  # (d,)
    passages: tuple[Passage, ...]  # n
    vectors: Float32  # (n, d)
    snapshot_id: str
    coverage: Coverage
    encoder_fingerprint: str = ""  # of the query's encoder

    def beside(self, own: Sequence[Passage], vectors: Float32) -> "Found":
        """These and the caller's own, with their vectors."""
        return replace(self, passages=(*self.passages, *own), vectors=np.concatenate([self.vectors, vectors]))


Look = Callable[[str], Awaitable[Found]]
Generate = Callable[[Retrieved, PartSettings], Awaitable[Generation]]


def no_passage(why: str) -> InvalidRequest:
    """The error where there is nothing to answer from."""
    return InvalidRequest(f"there must be a passage to answer from: {why}")


async def followed(
    question: str, settings: GenerationSettings, look: Look, generate: Generate
) -> tuple[Retrieved, Generation]:
    """The answer, and all passages that it was read from, whose scores and prior are those of the last query.

    Tokens keep the probability and the posterior that they were decided with; before a passage was found its
    posterior is 0. All passages are of one snapshot, all queries and all tokens of one model each: when another one is
    published or comes meanwhile, the answer begins anew. Raises as `look` and `generate`, and InvalidRequest: there is
    no passage.
    """
    found = await look(question)
    if not found.passages:
        raise no_passage("none is found but those that without leaves out")
    union = found
    decided: list[tuple[Token, dict[int, float]]] = []
    whole: tuple[Retrieved, Generation] | None = None
    while True:
        read = _scored(union, found)
        begun = whole[1].token_ids if whole else ()
        try:
            part = await generate(read, _part(settings, begun))
        except BegunByAnother:
            return await followed(question, settings, look, generate)
        of_part = part.tokens[len(begun) :]
        ids = [passage.id for passage in read.passages]
        decided += [(token, dict(zip(ids, token.log_posterior, strict=True))) for token in of_part]
        whole = read, part
        if part.ended or len(of_part) < settings.follow or len(part.token_ids) >= settings.max_new_tokens:
            one_part = len(decided) <= settings.follow
            return whole if one_part else (whole[0], _as_decided(*whole, decided))
        found = await _look_again(question, part.text, look)
        if (found.snapshot_id, found.encoder_fingerprint) != (union.snapshot_id, union.encoder_fingerprint):
            return await followed(question, settings, look, generate)
        union = _union(union, found)


async def _look_again(question: str, answer: str, look: Look) -> Found:
    """What is found for both, without the beginning of an answer with which they are too long to be read."""
    while True:
        try:
            return await look(f"{question} {answer}".strip())
        except InvalidRequest:
            if not answer:  # the question alone, which was read before: it is for another reason
                raise
            words = answer.split()  # some scripts put no spaces between words
            half = (len(words) + 1) // 2
            answer = " ".join(words[half:]) if len(words) > 1 else answer[(len(answer) + 1) // 2 :]


def _part(settings: GenerationSettings, begun: tuple[int, ...]) -> PartSettings:
    return PartSettings(**{**asdict(settings), "follow": 0}, begun=begun, n_more=settings.follow)


def _scored(union: Found, found: Found) -> Retrieved:
    """Best first by the latest query."""
    nothing = Retrieved((), np.empty(0, np.float32), union.snapshot_id, union.coverage, union.encoder_fingerprint)
    return joined(nothing, union.passages, canonical_scores(found.query, union.vectors))


def _union(union: Found, found: Found) -> Found:
    known = {passage.id for passage in union.passages}
    new = [i for i, passage in enumerate(found.passages) if passage.id not in known]
    looks = union.coverage, found.coverage
    missing = {shard for look in looks for shard in look.missing_shards}
    coverage = replace(min(looks, key=lambda look: look.share), missing_shards=tuple(sorted(missing)))
    return replace(union.beside([found.passages[i] for i in new], found.vectors[new]), coverage=coverage)


def _as_decided(read: Retrieved, generation: Generation, decided: list[tuple[Token, dict[int, float]]]) -> Generation:
    """The generation, whose text and spans are those of the whole, with what each token was decided with."""
    ids = [passage.id for passage in read.passages]
    log_posterior: Float64 = np.array([[held.get(id_, -np.inf) for id_ in ids] for _, held in decided])
    log_likelihood = [token.log_likelihood for token, _ in decided]
    rows = zip(generation.tokens, log_likelihood, map(tuple, log_posterior.tolist()), strict=True)
    return replace(
        generation,
        log_likelihood=float(np.sum(log_likelihood)),
        log_posterior=answer_log_posterior(log_posterior, np.ones(len(decided))),
        tokens=tuple(replace(token, log_likelihood=of_t, log_posterior=row) for token, of_t, row in rows),
    )
