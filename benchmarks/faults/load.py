"""Questions asked on a schedule over both protocols while something breaks, and what became of them.

Every answer is compared with the exact twin's: `openbook.testing.ExactIndex` behind the same pipeline.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from openbook.cache.memory import MemoryCache
from openbook.config import AnswerDefaults
from openbook.core.context import Context
from openbook.core.types import RetrievalSettings
from openbook.index.disk.snapshot import Snapshot
from openbook.loadtest.kinds import Arrivals, Check
from openbook.loadtest.outcomes import HANG, NOT_SENT, OK
from openbook.loadtest.result import Result
from openbook.loadtest.run import measure
from openbook.loadtest.senders import about, digest
from openbook.loadtest.settings import LoadSettings
from openbook.rag.pipeline import Pipeline
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder

from .system import DEADLINE_S, DIMENSION, N_SHARDS, System, passages, vectors

GRPC_RATE, HTTP_RATE = 20.0, 10.0
CALM_S = 2.0
"""Without a failure for so long is recovered."""
OURS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
"""What a fault may come to at a caller."""
FOREIGN = ("Traceback", "http2 header", "Error:", "Exception")
"""In messages that are not ours."""
T = TypeVar("T")


class Callers:
    """An event loop in a thread of its own, for all who ask."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, doing: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin to do something."""
        return asyncio.run_coroutine_threadsafe(doing, self._loop)

    def ask(self, address: str, questions: Path, rate: float, seconds: float, **options: Any) -> "Asking":
        """Begin to ask; returns once the first question is about to be sent."""
        values = {"address": address, "questions": questions, "rate": rate, "duration_s": seconds, "zipf": 0}
        values |= {"warm_up_s": 0, "arrivals": Arrivals.CONSTANT, "timeout_s": DEADLINE_S, "check": Check.BITS}
        settings = LoadSettings.model_validate(values | options)
        begun: Future[float] = Future()
        result = self.start(measure(settings, on_begin=begun.set_result))

        def fail(done: "Future[Result]") -> None:
            if error := done.exception():
                begun.set_exception(error)

        result.add_done_callback(fail)
        return Asking("HTTP" if settings.is_http else "gRPC", begun.result(60), result)


@dataclass(frozen=True)
class Asking:
    """One run that goes on."""

    protocol: str
    begun: float
    result: "Future[Result]"


class Twin:
    """What must be answered."""

    def __init__(self, snapshot: Path) -> None:
        self._snapshot_id = Snapshot.open(snapshot).manifest.snapshot_id
        self._index = ExactIndex(passages(), vectors(), self._snapshot_id, N_SHARDS)
        encoder = HashEncoder(DIMENSION)
        self._pipeline = Pipeline(encoder, self._index, self._index, EchoGenerator(), MemoryCache(1), AnswerDefaults())

    def digests(self, questions: Sequence[str]) -> dict[int, int]:
        """Of the right answers, whole and without either shard, by what they are about."""
        return asyncio.run(self._digests(questions))

    async def _digests(self, questions: Sequence[str]) -> dict[int, int]:
        found = {}
        generation = AnswerDefaults().generation()
        for missing in ((), *((shard,) for shard in range(N_SHARDS))):
            self._index.missing_shards = set(missing)
            for question in questions:
                retrieval = RetrievalSettings(k=AnswerDefaults().k, min_coverage=1 / 3)
                answer = await self._pipeline.answer(question, retrieval, generation, Context())
                ids = [each.passage.id for each in answer.evidence]
                numbers = [value for each in answer.evidence for value in (each.score, each.log_prior)]
                of = digest(Check.BITS, answer.text, ids, numbers)
                found[about(question, self._snapshot_id, missing)] = of
        return found


@dataclass(frozen=True)
class Moments:
    """Of one case, in monotonic time."""

    hurt: float
    healed: float | None  # None: the benchmark heals nothing
    end: float


def verdict(askings: Iterable[Asking], expected: dict[int, int], moments: Moments) -> dict[str, Any]:
    """What became of the questions: see the columns in `bench_faults.py`."""
    sent, n_wrong, late, worst_s = 0, 0, 0, 0.0
    failed: list[float] = []
    statuses: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for asking in askings:
        outcomes = asking.result.result().outcomes
        sent += len(outcomes)
        ok = outcomes.among(OK)
        right = np.array([expected.get(key) for key in outcomes.about.tolist()], object) == outcomes.digest
        bad = ~ok | ~right
        n_wrong += int((ok & ~right).sum())
        failed += (outcomes.intended_s[bad] + asking.begun).tolist()
        after = ok & (outcomes.done_s + asking.begun >= moments.hurt)
        worst_s = max([worst_s, *outcomes.latency_s[after].tolist()])
        late += int((outcomes.sent_s - outcomes.intended_s > 0.25).sum())
        for i in np.flatnonzero(~ok).tolist():
            label = outcomes.labels[outcomes.label[i]]
            seen = "" if label.seen == label.status else f" ({label.seen})"
            name = f"{asking.protocol} {label.status}{seen}"
            statuses[name] += 1
            examples.setdefault(name, label.example)
    recovery_s, when = _recovery(failed, moments)
    return {
        "sent": sent,
        "sent_late": late,
        "wrong": n_wrong,
        "hangs": sum(n for name, n in statuses.items() if HANG in name),
        "failed": dict(statuses),
        "foreign": sum(n for name, n in statuses.items() if is_foreign(name, examples[name])),
        "examples": examples,
        "failed_before": sum(at < moments.hurt - DEADLINE_S for at in failed),
        "recovery_s": recovery_s,
        "recovered": when,
        "worst_s": round(worst_s, 3),
    }


def is_foreign(name: str, example: str) -> bool:
    """Whether callers hear what nobody here has written."""
    if HANG in name or NOT_SENT in name:
        return False
    return not any(code in name for code in OURS) or any(words in example for words in FOREIGN)


def _recovery(failed: Sequence[float], moments: Moments) -> tuple[float | None, str]:
    """Seconds until the last failed question was sent, from the healing if it was waited for, else from the fault."""
    if not failed:
        return 0.0, "never failed"
    last = max(failed)
    if last > moments.end - CALM_S:
        return None, "no"
    if moments.healed is not None and last > moments.healed - 1.0:
        return round(max(0.0, last - moments.healed), 2), "when healed"
    return round(max(0.0, last - moments.hurt), 2), "by itself"


def probe(system: System, callers: Callers, questions: Path) -> bool:
    """Whether a second's questions are all answered."""
    outcomes = callers.ask(system.grpc, questions, 10.0, 1.0, seed=3).result.result(30).outcomes
    return bool(outcomes.among(OK).all())
