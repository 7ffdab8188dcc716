"""The endpoint from Python, over gRPC: needs neither torch nor Ray. Other languages start from protos/."""

from openbook.client.asynchronous import AsyncClient
from openbook.client.blocking import Client
from openbook.client.messages import AnswerOptions, RetrieveOptions
from openbook.core.types import Decoding, Formulation, OwnPassage, Token
from openbook.rag.answer import Answer, Retrieval

__all__ = [
    "Answer",
    "AnswerOptions",
    "AsyncClient",
    "Client",
    "Decoding",
    "Formulation",
    "OwnPassage",
    "Retrieval",
    "RetrieveOptions",
    "Token",
]
