"""OpenAI's requests, and the questions that they are to us."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from openbook.errors import InvalidRequest
from openbook.serving.endpoint.openai_errors import Refused
from openbook.serving.endpoint.schemas import AnswerRequest
from openbook.serving.endpoint.sent import Flag, Real, Sent, Whole32, Whole64, parsed

OURS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "n": "n_answers",
}
"""What OpenAI's parameters are called here; of two for the same the later one counts."""

IGNORED = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls"),
    )
)
"""Whose value changes no answer, whatever it is."""

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "stop": ([], ""),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}
"""What we do not have, and the values that ask for nothing of it. null does too."""


class Part(BaseModel):
    """A part of a message: of type `text` it is read."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


def _either(what: str) -> WrapValidator:
    """One problem, of the field. Of a union pydantic tells one of each kind, under names that no caller sent."""

    def checked(value: Any, as_declared: ValidatorFunctionWrapHandler) -> Any:
        try:
            return as_declared(value)
        except ValidationError:
            raise PydanticCustomError("union", "should be {what}", {"what": what}) from None

    return WrapValidator(checked)


class Message(BaseModel):
    """One message of a conversation. The last one of the user's is the question; the others are not read."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | Annotated[list[Part], Field(fail_fast=True)] | None,
        _either("text or a list of parts, objects with a type and, of type 'text', a text"),
    ] = None


class StreamOptions(BaseModel):
    """How a stream is told."""

    model_config = ConfigDict(extra="allow")

    include_usage: Annotated[Flag, Field(description="Before the end a chunk with the usage.")] = False


class ChatRequest(BaseModel):
    """OpenAI's request for a chat completion. Fields of AnswerRequest (`k`, `timeout_s`, `formulation` ...) may stand
    beside these, under their own names.
    """

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(description="`openbook`, or the generator's name, as `/v1/models` lists them.")]
    messages: Annotated[list[Message], Field(fail_fast=True, description="The last one of the user's is the question.")]
    max_completion_tokens: Annotated[Whole32 | None, Field(description="`max_new_tokens`.")] = None
    max_tokens: Annotated[Whole32 | None, Field(description="As max_completion_tokens, which wins.")] = None
    temperature: Annotated[Real | None, Field(description="Above 0 tokens are sampled, without beams.")] = None
    top_p: Annotated[Real | None, Field(description="Sample from the tokens that hold so much together.")] = None
    seed: Whole64 | None = None
    n: Annotated[Whole32 | None, Field(description="`n_answers`: at most n_beams, or so many samples.")] = None
    logprobs: Flag | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def question(self) -> str:
        """The text of the user's last message. Raises Refused: there is none, or it has parts that are no text."""
        for number in reversed(range(len(self.messages))):
            if self.messages[number].role == "user":
                return _text(self.messages[number].content, f"messages[{number}].content")
        raise Refused("messages must have one of role 'user': the last one is the question", "messages", "missing")

    def asked(self) -> AnswerRequest:
        """The question as ours.

        Raises:
            InvalidRequest: a parameter is unknown, or none that we have; the question is none.
        """
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        own = {name: extra.pop(name) for name in AnswerRequest.model_fields if name in extra}
        for name, value in extra.items():
            _check_without_effect(name, value)
        if "question" in own:
            raise Refused("question must be the last message of the user's, not a field", "question")
        given = {ours: value for theirs, ours in OURS.items() if (value := getattr(self, theirs)) is not None}
        return parsed(AnswerRequest, {**given, **own, "question": self.question})

    @contextmanager
    def in_their_words(self) -> Iterator[None]:
        """What is wrong with a field of ours is said of the parameter that gave it."""
        try:
            yield
        except InvalidRequest as error:
            message, own = str(error), self.model_extra or {}
            if message.startswith("question "):
                raise Refused(f"messages: the {message}", "messages", "invalid_value") from None
            for theirs, ours in reversed(OURS.items()):  # the later one counts, and a field of ours before both
                given = getattr(self, theirs) is not None and own.get(ours) is None
                if given and message.startswith(f"{ours} "):
                    raise Refused(theirs + message.removeprefix(ours), theirs, "invalid_value") from None
            raise


class EmbeddingsRequest(Sent):
    """OpenAI's request for embeddings. They are those of questions, made by the query encoder."""

    model: Annotated[str, Field(description="`openbook`, or the encoder's name, as `/v1/models` lists them.")]
    input: Annotated[
        str | Annotated[list[str], Field(fail_fast=True)],
        _either("UTF-8 text or a list of texts, not tokens"),
        Field(description="A text, or several; no tokens."),
    ]
    encoding_format: Annotated[Literal["float", "base64"] | None, Field(description="Left out: float.")] = None
    dimensions: Annotated[Whole32 | None, Field(description="None but the encoder's own can be had.")] = None
    user: str | None = None
    timeout_s: Annotated[Real | None, Field(description="Time within which they are worth having.")] = None

    @property
    def texts(self) -> tuple[str, ...]:
        """One or several."""
        return (self.input,) if isinstance(self.input, str) else tuple(self.input)

    def check_dimension(self, dimension: int) -> None:
        """Raises Refused: another one was asked for."""
        if self.dimensions not in (None, dimension):
            raise Refused(f"dimensions must be {dimension}, got {self.dimensions}", "dimensions")


def _text(content: str | list[Part] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type != "text":
            raise Refused(f"{where} must have parts of type 'text' alone, got {part.type[:50]!r}", where)
    return "\n".join(part.text or "" for part in content)


def _check_without_effect(name: str, value: Any) -> None:
    if name in IGNORED:
        return
    if name not in WITHOUT_EFFECT:
        raise Refused(f"unknown parameter {name[:50]!r}", name[:50], "unknown_parameter")
    if value not in WITHOUT_EFFECT[name]:
        shown = repr(value)[:100] if isinstance(value, str | int | float) else f"a {type(value).__name__}"
        raise Refused(f"{name} is not supported, got {shown}", name)
