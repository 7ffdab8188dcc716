"""OpenAI's replies: chat completions whole and in chunks, embeddings, models."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from openbook.serving.endpoint.schemas import AnswerResponse, Log, OriginOut


class UrlCitation(BaseModel):
    """Which part of the answer rests on which passage."""

    start_index: Annotated[int, Field(description="Of the part's first character in the content.")]
    end_index: Annotated[int, Field(description="Behind its last one.")]
    title: str
    url: str
    evidence: Annotated[int, Field(description="Which of `citations`, from 0.")]
    probability: Annotated[float, Field(description="The mean over its tokens of p(z|x,y).")]


class Annotation(BaseModel):
    """A citation, as web search has them."""

    type: Literal["url_citation"] = "url_citation"
    url_citation: UrlCitation


class Cited(BaseModel):
    """A passage that was read, with what it contributed. Logs are natural."""

    title: str
    url: Annotated[str, Field(description="The document's, or its id if that is a URL; else `openbook:` and the id.")]
    text: str
    document_id: str
    passage_id: int
    lasting_id: str
    origin: OriginOut | None
    score: float
    log_prior: Log
    log_posterior: Log


class TokenLogprob(BaseModel):
    """One token of the content, as generated."""

    token: str
    logprob: Annotated[float, Field(description="log p(y_t|x,y_<t), marginal over the passages.")]
    bytes: list[int]
    top_logprobs: list[Any] = []


class Logprobs(BaseModel):
    """Of the content; nothing of refusals."""

    content: list[TokenLogprob]
    refusal: None = None


class Usage(BaseModel):
    """What was read and written."""

    prompt_tokens: Annotated[int, Field(description="Words of the question: the endpoint has no tokenizer.")]
    completion_tokens: Annotated[int, Field(description="The generator's tokens, the end of sequence too.")] = 0
    total_tokens: int


class ReplyMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: Annotated[str | None, Field(description="Why there is no content: less probable, or sure, than asked.")]
    annotations: list[Annotation]


FinishReason = Literal["stop", "length"]


class Choice(BaseModel):
    """One answer."""

    index: int
    message: ReplyMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason


class _Completion(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: Annotated[str, Field(description="Of snapshot, encoder and generator.")]


class ChatCompletion(_Completion):
    """OpenAI's reply, with what only openbook knows beside it."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[Choice]
    usage: Usage
    citations: Annotated[list[Cited], Field(description="The passages that were read, by score.")]
    openbook: Annotated[AnswerResponse, Field(description="The answer as /v1/answer gives it.")]


class Delta(TypedDict, total=False):
    """What a chunk adds."""

    role: Literal["assistant"]
    content: str
    refusal: str
    annotations: list[Annotation]


class ChunkChoice(BaseModel):
    """What a chunk adds to one answer."""

    index: int = 0
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(_Completion):
    """One event of a stream. The last one with a choice has the citations."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = None
    citations: list[Cited] | None = None
    openbook: AnswerResponse | None = None

    def to_json(self) -> str:
        """Without what it has not."""
        lacks = {name for name in ("usage", "citations", "openbook") if getattr(self, name) is None}
        return self.model_dump_json(exclude=lacks)


class Embedding(BaseModel):
    """One embedding."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Annotated[list[float] | str, Field(description="Numbers, or float32 in base64, least byte first.")]


class Embeddings(BaseModel):
    """One embedding a text, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class ModelCard(BaseModel):
    """A model that can be named in a request."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "openbook"


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
