"""A whole serving tier with models that need no time: real Ray Serve, real index servers, real Redis."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest

from openbook.config import EncoderSettings, GeneratorSettings, Settings, parse
from openbook.core.confidence import SIGNALS, Calibration, Curve
from openbook.core.deadline import Check
from openbook.core.fingerprint import text_digest
from openbook.core.marginal import log_prior
from openbook.core.origin import Origin
from openbook.core.types import Formulation, Generation, GenerationSettings, Passage, Retrieved, Token
from openbook.errors import InvalidRequest
from openbook.index.building.build import add_bm25, build_snapshot
from openbook.processes import free_port
from openbook.serving.launch import run
from openbook.serving.launch.local import local_tiers
from openbook.testing import HashEncoder, word_tokens

TEXTS = [
    ("bell", "Telephone", "Bell patented the telephone in 1876"),
    ("curie", "Marie Curie", "Curie was born in Warsaw"),
    ("moon", "Moon", "the Moon goes around the Earth"),
    ("zurich", "Zürich", "Zürich liegt an der Limmat, 苏黎世"),
]
PASSAGES = [
    Passage(i, *each, Origin(document_digest=text_digest(each[2]), start=0, end=len(each[2]), path=f"{each[0]}.md"))
    for i, each in enumerate(TEXTS)
]
DIMENSION = 64
QUESTION = "who patented the telephone"


def flag(question: str) -> Path:
    """The file, named at a question's end, that keeps its answer from ending for as long as it is there."""
    return Path(question.split()[-1])


def begun(question: str) -> Path:
    """The file that is there as soon as the model ponders the question."""
    return flag(question).with_suffix(".begun")


class EchoModel:
    """Answers with the best passage, except questions about its own misbehaviour."""

    fingerprint = generates_by = "echo"
    calibration: ClassVar[Calibration] = {Formulation.SEQUENCE: Curve((0.0,) * len(SIGNALS), 0.0, (0.0,), (0.6,))}

    def generate(
        self, questions: Sequence[str], retrieved: Sequence[Retrieved], settings: GenerationSettings, check: Check
    ) -> list[Generation]:
        for question in questions:
            if question.startswith("explode"):
                raise RuntimeError("a secret of the house")
            if question.startswith("unreadable"):
                raise InvalidRequest("question has 9999 tokens, the generator reads 300")
            while question.startswith("dawdle") and flag(question).exists():
                time.sleep(0.01)
            self._ponder(question, check)
        return [self._echo(each, settings) for each in retrieved]

    def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, check: Check
    ) -> Iterator[Token | Generation]:
        self._ponder(question, check)
        generation = self._echo(retrieved, settings)
        for i, token in enumerate(generation.tokens):
            if question.startswith("explode") and i == 2:
                raise RuntimeError("a secret of the house")
            yield replace(token, start=None, end=None)
        while question.startswith("endless") and flag(question).exists():
            time.sleep(0.01)
            yield Token(" more", -0.5, tuple(generation.log_prior.tolist()))
        yield generation

    def _ponder(self, question: str, check: Check) -> None:
        while question.startswith("ponder") and flag(question).exists():
            begun(question).touch()
            check()
            time.sleep(0.01)

    def _echo(self, retrieved: Retrieved, settings: GenerationSettings) -> Generation:
        words = retrieved.passages[0].text.split()[: settings.max_new_tokens]
        prior = log_prior(retrieved.scores)
        tokens = word_tokens(words, prior, log_likelihood=-0.5)
        return Generation(" ".join(words), tuple(range(len(words))), -1.25, prior, prior, tokens)


def load_hash(settings: EncoderSettings) -> HashEncoder:
    return HashEncoder(DIMENSION)


def load_echo(settings: GeneratorSettings) -> EchoModel:
    return EchoModel()


@dataclass(frozen=True)
class System:
    """A running serving tier."""

    settings: Settings

    @property
    def grpc(self) -> str:
        return self.settings.serving.grpc_address

    @property
    def http(self) -> str:
        return self.settings.serving.http_url


def write_snapshot(folder: Path) -> Path:
    """Two shards of PASSAGES."""
    encoder = HashEncoder(DIMENSION)
    vectors = encoder.encode_passages(PASSAGES)
    build_snapshot(PASSAGES, vectors, folder, 2, "Flat", "hash", encoder.fingerprint, fields=())
    add_bm25(folder)
    return folder


@contextmanager
def index_tier(snapshot: Path, redis_url: str, **serving: Any) -> Iterator[Settings]:
    """Index servers, and the settings of a serving tier that asks them."""
    values = {
        "index": {"timeout_s": 60},
        "cache": {"url": redis_url, "timeout_s": 60},  # the default, 0.05 s, passes on busy machines: a miss
        "encoder": {"num_cpus": 0.1},
        "generator": {"num_cpus": 0.1},
        "serving": {"num_cpus": 0.1, **serving},
    }
    with local_tiers(snapshot, parse(values)) as settings:
        yield settings


@contextmanager
def serving_tier(settings: Settings, modules: Sequence[str] = (), **serving: Any) -> Iterator[System]:
    """Ray Serve on free ports. `modules`: those with more models for it; `serving`: what settings do not say yet."""
    import ray

    # The workers know nothing of the tests' folder.
    for module in (__name__, *modules):
        ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    from openbook.serving.app import assemble

    changed = {"http_port": free_port(), "grpc_port": free_port(), **serving}
    settings = settings.model_copy(update={"serving": settings.serving.model_copy(update=changed)})
    with TemporaryDirectory() as hidden, pytest.MonkeyPatch.context() as patch:
        # Of Ray's processes each would import it, where there is one, for nothing: what serves is installed without.
        Path(hidden, "pandas.py").write_text("raise ImportError\n")
        patch.setenv("PYTHONPATH", hidden, prepend=os.pathsep)
        with run.local_serve(settings.serving, num_cpus=2):
            run.deploy(assemble(settings, load_hash, load_echo), settings.serving)
            yield System(settings)
