"""The endpoint from Python, over gRPC: needs neither torch nor Ray. Other languages start from protos/."""

from openbook.client.asynchronous import AsyncClient
from openbook.client.blocking import Client
from openbook.client.messages import AnswerOptions, RetrieveOptions
from openbook.core.origin import Origin
from openbook.core.types import Decoding, Formulation, OwnPassage, Passage, RetrieverKind, Token
from openbook.rag.answer import Answer, Excerpt, Retrieval

__all__ = [
    "Answer",
    "AnswerOptions",
    "AsyncClient",
    "Client",
    "Decoding",
    "Excerpt",
    "Formulation",
    "Origin",
    "OwnPassage",
    "Passage",
    "Retrieval",
    "RetrieveOptions",
    "RetrieverKind",
    "Token",
]
