"""Answers as chat completions, whole and in chunks."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from openbook.core.types import Citation, Token
from openbook.rag.answer import Alternative, Answer, Event, Evidence, Retrieval
from openbook.serving.endpoint.openai.replies import (
    Annotation,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    Cited,
    Delta,
    FinishReason,
    Logprobs,
    ReplyMessage,
    TokenLogprob,
    UrlCitation,
    Usage,
)
from openbook.serving.endpoint.openai.requests import ChatRequest
from openbook.serving.endpoint.schemas import AnswerResponse, OriginOut
from openbook.serving.endpoint.urls import url_of

LOWEST_LOGPROB = -9999.0
"""What OpenAI has for the logarithm of zero."""
HELD_BACK = "No answer is as probable as min_probability asks, or as surely right as min_confidence asks."
FIRST = Delta(role="assistant", content="")


@dataclass(frozen=True)
class Said:
    """One answer as a choice: all that is told of it."""

    text: str
    tokens: Sequence[Token]
    citations: Sequence[Citation]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Chat:
    """One request for a completion, and how its answers become replies."""

    request: ChatRequest
    tells_tokens: bool  # in what only openbook knows; without being asked they would be most of it
    created: int = field(default_factory=lambda: int(time.time()))  # in all chunks the same

    def completion(self, answer: Answer) -> ChatCompletion:
        """The whole reply."""
        choices = [
            Choice(
                index=index,
                message=ReplyMessage(
                    content=None if answer.abstained else said.text,
                    refusal=HELD_BACK if answer.abstained else None,
                    annotations=_annotations(said.citations, answer.evidence),
                ),
                logprobs=self._logprobs(said.tokens),
                finish_reason=said.finish_reason,
            )
            for index, said in enumerate(_said(answer))
        ]
        return ChatCompletion(
            **self._of(answer),
            choices=choices,
            usage=self._usage(answer),
            citations=_cited(answer.evidence),
            openbook=self._openbook(answer),
        )

    async def chunks(self, first: Event, events: AsyncIterator[Event]) -> AsyncGenerator[ChatCompletionChunk]:
        """The reply in pieces. The joined contents of each choice are what the indices of its annotations mean.

        Tokens that are decided one by one come as they are decided, as generated. Others come when the answer stands,
        as spelled.
        """
        assert isinstance(first, Retrieval)
        of = self._of(first)
        told: list[str] = []  # of the tokens that came before the answer stood
        yield ChatCompletionChunk(**of, choices=[ChunkChoice(delta=FIRST)])
        async for event in events:
            if isinstance(event, Token):
                if event.start is None:
                    told.append(event.text)
                    choice = ChunkChoice(delta=Delta(content=event.text), logprobs=self._logprobs([event]))
                    yield ChatCompletionChunk(**of, choices=[choice])
            elif isinstance(event, Answer):
                of = self._of(event)
                for choice in self._ends(event, told):
                    yield ChatCompletionChunk(**of, choices=[choice])
                last = self._last(event, told)
                cited, openbook = _cited(event.evidence), self._openbook(event)
                yield ChatCompletionChunk(**of, choices=last, citations=cited, openbook=openbook)
                if self.request.includes_usage:
                    yield ChatCompletionChunk(**of, choices=[], usage=self._usage(event))

    def _ends(self, answer: Answer, told: Sequence[str]) -> Iterator[ChunkChoice]:
        """What has not been told yet of each answer."""
        if answer.abstained:
            yield ChunkChoice(delta=Delta(refusal=HELD_BACK))
            return
        for index, said in enumerate(_said(answer)):
            if index:
                yield ChunkChoice(index=index, delta=FIRST)
            if index or not told:
                for text, tokens in _pieces(said):
                    yield ChunkChoice(index=index, delta=Delta(content=text), logprobs=self._logprobs(tokens))

    def _last(self, answer: Answer, told: Sequence[str]) -> list[ChunkChoice]:
        """Of each answer how it ended, and its citations."""
        choices = []
        for index, said in enumerate(_said(answer)):
            citations = said.citations if index or not told else _moved(said, told)
            delta = Delta(annotations=_annotations(citations, answer.evidence))
            choices.append(ChunkChoice(index=index, delta=delta, finish_reason=said.finish_reason))
        return choices

    def _of(self, about: Retrieval | Answer) -> dict[str, Any]:
        prints = (about.snapshot_id, about.encoder_fingerprint, getattr(about, "generator_fingerprint", ""))
        return {
            "id": f"chatcmpl-{about.request_id}",
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": "fp_" + "_".join(each[:12] for each in prints if each),
        }

    def _logprobs(self, tokens: Sequence[Token]) -> Logprobs | None:
        if not self.request.logprobs:
            return None
        content = [
            TokenLogprob(
                token=token.text, logprob=max(token.log_likelihood, LOWEST_LOGPROB), bytes=list(token.text.encode())
            )
            for token in tokens
            if token.text
        ]
        return Logprobs(content=content)

    def _usage(self, answer: Answer) -> Usage:
        n_read = n_words(self.request.question)
        n_written = sum(len(said.tokens) for said in _said(answer))
        return Usage(prompt_tokens=n_read, completion_tokens=n_written, total_tokens=n_read + n_written)

    def _openbook(self, answer: Answer) -> AnswerResponse:
        response = AnswerResponse.model_validate(answer)
        if self.tells_tokens:
            return response
        answers = [each.model_copy(update={"tokens": []}) for each in response.answers]
        return response.model_copy(update={"tokens": [], "answers": answers})


def n_words(text: str) -> int:
    """What the endpoint counts in place of tokens, which only the models know."""
    return len(text.split())


def _said(answer: Answer) -> list[Said]:
    several: Sequence[Alternative | Answer] = answer.answers if len(answer.answers) > 1 else [answer]
    if answer.abstained:
        several = [answer]
    return [Said(each.text, each.tokens, each.citations, "length" if each.cut else "stop") for each in several]


def _pieces(said: Said) -> Iterator[tuple[str, list[Token]]]:
    """The answer as spelled, token by token, as far as its tokens have a place in it."""
    end = 0
    for token in said.tokens:
        if token.end is not None and token.end > end:
            yield said.text[end : token.end], [token]
            end = token.end
    if end < len(said.text):
        yield said.text[end:], []


def _moved(said: Said, told: Sequence[str]) -> list[Citation]:
    """Citations of the text that was told, token by token and as generated, in place of the answer as spelled."""
    places, length = [], 0
    for text in told:
        places.append((length + len(text) - len(text.lstrip()), length + len(text)))
        length += len(text)
    found = []
    for each in said.citations:
        inside = [
            place
            for token, place in zip(said.tokens, places, strict=False)
            if token.start is not None and token.end is not None and each.start <= token.start < token.end <= each.end
        ]
        if inside:
            found.append(Citation(inside[0][0], inside[-1][1], each.evidence, each.probability))
    return found


def _annotations(citations: Sequence[Citation], evidence: Sequence[Evidence]) -> list[Annotation]:
    return [
        Annotation(
            url_citation=UrlCitation(
                start_index=each.start,
                end_index=each.end,
                title=evidence[each.evidence].passage.title,
                url=url_of(evidence[each.evidence].passage),
                evidence=each.evidence,
                probability=each.probability,
            )
        )
        for each in citations
    ]


def _cited(evidence: Sequence[Evidence]) -> list[Cited]:
    return [
        Cited(
            title=each.passage.title,
            url=url_of(each.passage),
            text=each.passage.text,
            document_id=each.passage.document_id,
            passage_id=each.passage.id,
            lasting_id=each.passage.lasting_id,
            origin=OriginOut.model_validate(each.passage.origin) if each.passage.origin else None,
            score=each.score,
            log_prior=each.log_prior,
            log_posterior=each.log_posterior,
        )
        for each in evidence
    ]
