"""A run of tiny parts: DPR and BART with random weights, some passages with random vectors, some questions."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Barrier, Lock, Thread
from typing import Any, TypeVar

import numpy as np
import tiny_checkpoints as tiny
import torch
from torch import Tensor

from openbook.core.space import Space
from openbook.core.types import Float32, Passage
from openbook.corpus.questions import Question
from openbook.index.building.build import build_snapshot
from openbook.models.checkpoint import load_generator
from openbook.models.encoder import load_encoder
from openbook.training.data import Example
from openbook.training.loss import RagLoss
from openbook.training.retrieval import PassageFinder
from openbook.training.settings import TrainingSettings
from openbook.training.world import World

torch.set_num_threads(1)

T = TypeVar("T")

SPACE, DIMENSION = "wikipedia", 16
WORDS = tiny.TEXT.split()


def models(folder: Path) -> tuple[str, str]:
    """Folders of a query encoder and a generator, the same each time."""
    torch.manual_seed(0)
    encoder = tiny.save(folder / "dpr", tiny.rag().rag.question_encoder, tiny.word_tokenizer(), space=SPACE)
    return encoder, tiny.save(folder / "bart", tiny.bart(), tiny.byte_tokenizer())


def texts(n: int, n_words: int, seed: int = 0) -> list[str]:
    return [" ".join(words) for words in np.random.default_rng(seed).choice(WORDS, (n, n_words))]


def passages(n: int) -> list[Passage]:
    return [Passage(i, f"d{i}", f"t{i}", text) for i, text in enumerate(texts(n, 4))]


def asks_for(encoder: str = SPACE, dimension: int = 0) -> Space:
    """What the query encoder asks for."""
    return Space("tiny", encoder, dimension or vectors(1).shape[1])


def vectors(n: int, seed: int = 1) -> Float32:
    return np.random.default_rng(seed).standard_normal((n, DIMENSION)).astype(np.float32)


def snapshot(folder: Path, n: int = 9, n_shards: int = 2) -> Path:
    build_snapshot(passages(n), vectors(n), folder / "snapshot", n_shards, "Flat", "tiny", SPACE)
    return folder / "snapshot"


def questions(folder: Path, n: int = 8) -> Path:
    pairs = zip(texts(n, 3, seed=2), texts(n, 1, seed=3), strict=True)
    return jsonl(folder / "questions.jsonl", *({"question": x, "answers": [y]} for x, y in pairs))


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def curve(out: Path) -> list[dict[str, float]]:
    """Of metrics.jsonl, without the one number that depends on the clock."""
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_s"} for line in read]


def examples(n: int = 8) -> list[Example]:
    pairs = zip(texts(n, 3, seed=2), texts(n, 1, seed=3), strict=True)
    return [Example(x, y, Question(str(i), x, (y,), context=x)) for i, (x, y) in enumerate(pairs)]


def settings(**sections: dict[str, Any]) -> TrainingSettings:
    """What `openbook train` would read, files that nobody opens where none are named."""
    task = {"train": [{"path": "questions.jsonl"}]}
    retrieval = {"kind": "dense", "k": 3, "snapshot": "snapshot"}
    loop = {"out": "out", "n_steps": 5, "batch_size": 8, "micro_batch_size": 4}
    given: dict[str, dict[str, Any]] = {
        "task": task,
        "retrieval": retrieval,
        "loop": loop,
        "models": {"dropout": False},
    }
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values}
    return TrainingSettings.model_validate(given)


def objective(folder: Path, retriever: PassageFinder, asked: TrainingSettings, precise: bool = True) -> RagLoss:
    """The loss over the tiny models, which are saved into the folder if they are not there; on request in float64."""
    encoder, generator = models(folder) if not (folder / "dpr").exists() else (folder / "dpr", folder / "bart")
    loss = RagLoss(load_encoder(str(encoder)), load_generator(str(generator)), retriever, asked)
    return loss.double() if precise else loss


def no_gradients(module: torch.nn.Module) -> None:
    """Zeros, as a loop begins its steps."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    """Those that are not nothing."""
    named = ((name, parameter.grad) for name, parameter in module.named_parameters())
    return {name: gradient for name, gradient in named if gradient is not None and gradient.any()}


class Together:
    """Workers in threads of this process, one computing at a time: torch's random numbers are those of the process."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers
        self.computing = Lock()
        self._barrier = Barrier(n_workers, timeout=60)
        self._given: list[Any] = [None] * n_workers

    def run(self, work: Callable[[World], None]) -> None:
        """Let every worker do its work, and wait for them. Raises what one of them raised."""
        problems: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                with self.computing:
                    work(Worker(self, rank))
            except BaseException as problem:
                problems.append(problem)
                self._barrier.abort()

        threads = [Thread(target=one, args=(rank,)) for rank in range(self.n_workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def gathered(self, rank: int, value: T) -> list[T]:
        """What every worker gave, by rank."""
        self._given[rank] = value
        self.computing.release()
        try:
            self._barrier.wait()
            values = list(self._given)
            self._barrier.wait()  # nobody gives anew, or changes what it gave, before all have seen it
        finally:
            self.computing.acquire()
        return values


class Worker:
    """One of them."""

    def __init__(self, together: Together, rank: int) -> None:
        self.rank, self.n_workers = rank, together.n_workers
        self._together = together

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        copies = [tensor.detach().clone() for tensor in tensors]
        columns = zip(*self._together.gathered(self.rank, copies), strict=True)
        with torch.no_grad():
            for tensor, column in zip(tensors, columns, strict=True):
                tensor.copy_(torch.stack(column).sum(0))

    def of_first(self, value: T) -> T:
        return self._together.gathered(self.rank, value)[0]
