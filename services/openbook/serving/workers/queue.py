"""What waits for a model: who may come in, whose turn it is, what makes a batch. Pure: no thread, no event loop."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from openbook import telemetry
from openbook.core.context import Context
from openbook.core.deadline import SPARE, Clock
from openbook.core.turns import Turns
from openbook.errors import DeadlineExceeded, OpenbookError, Overloaded
from openbook.serving.workers.pace import Pace
from openbook.serving.workers.under_way import UnderWay
from openbook.serving.workers.worker import SHARE_BETWEEN

SHORT = 8
"""What takes at most this part of what is left of a batch does not wait for its end."""
FEW = 2
"""Who has at most this part of what another one has here asks for little. A smaller part would be a trap: who once had
to wait has more here than he asks for, would therefore wait on, and never be let past."""
HEAVY = 2
"""What takes more than this part of a batch under way must not make it late: where a batch takes hardly longer than one
question, all of it would be thrown away for one."""
KEPT = 8
"""One part in so many of the streams' places is for others than who holds the rest."""


@dataclass(eq=False, slots=True)
class Waiting:
    """One question's place."""

    key: Hashable  # only equal ones share a batch
    kind: Hashable  # equal for equal keys; by it the pace knows how long it takes
    work: int  # in proportion to that time, among those of a kind
    context: Context
    is_stream: bool = False  # shares no batch: goes step by step beside what else is computed

    @property
    def remaining_s(self) -> float:
        """Until its deadline."""
        return self.context.deadline.remaining_s()


W = TypeVar("W", bound=Waiting)
E = TypeVar("E", bound=OpenbookError)


class Queue(Generic[W]):
    """Callers take turns by the work that they ask for. What cannot be ready in time does not come in.

    Args:
        name: of the model, for messages.
        max_batch: questions in a batch, and streams at once.
        max_queue: questions and streams that are here at once, those in the batch under way apart.
        max_work: of a batch, unless it is of one question.
    """

    def __init__(self, name: str, max_batch: int, max_queue: int, max_work: float, clock: Clock) -> None:
        self._name = name
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._max_work = max_work
        self._clock = clock
        self._pace = Pace()
        self._turns: Turns[W] = Turns()
        self._streams: dict[W, float] = {}  # under way, and the seconds that each is predicted to take
        self._under_way: UnderWay[W] = UnderWay(clock)

    def __len__(self) -> int:
        return len(self._turns)

    def enter(self, newcomer: W) -> list[tuple[W, OpenbookError]]:
        """Let it wait. Returns whom it puts out.

        Raises:
            Overloaded: it would not be ready in time, or there is no room for it.
            DeadlineExceeded: it would not be if its turn were now.
        """
        is_tried, put_out = self._place(newcomer)
        if is_tried:
            self._pace.tried(newcomer.kind, self._clock())
        for each, full in put_out:
            self._counted("room", full)
            self._turns.remove(each)
        return put_out

    def check(self, newcomer: Waiting) -> None:
        """Whether it would come in now; it does not. Raises as `enter`."""
        newcomer = cast(W, newcomer)  # is out again before anybody takes it
        self._place(newcomer)
        self._turns.remove(newcomer)

    def _place(self, newcomer: W) -> tuple[bool, list[tuple[W, OpenbookError]]]:
        """Let it wait. Returns whether it is tried, and whom it is to put out. Raises as `enter`."""
        newcomer.context.deadline.check(self._name)
        own_s = self._pace.seconds(newcomer.kind, newcomer.work)
        if self._is_hopeless(newcomer):
            why = f"deadline would pass before {self._name} was done: it takes some {own_s:.1f} s"
            raise self._counted("time", DeadlineExceeded(why))
        is_next = not self._under_way and not self._streams and not len(self)
        self._turns.put(newcomer.context.caller, newcomer, newcomer.work)
        try:
            return not is_next and self._check_in_time(newcomer), self._make_room(newcomer)
        except OpenbookError:
            self._turns.remove(newcomer)
            raise

    def leave(self, waiting: W) -> None:
        """It waits no longer, or its stream is over. May be called of whoever has left."""
        self._streams.pop(waiting, None)
        if waiting in self._turns:
            self._turns.remove(waiting)

    def waiting(self) -> list[W]:
        """All that wait, by whose turn it is."""
        return list(self._turns.in_order())

    def streams(self) -> list[W]:
        """Those that may begin now: they are under way from here on, until they leave."""
        begun = []
        for each in self.waiting():
            if each.is_stream and self._has_place(each.context.caller):
                self._turns.give(each)
                self._streams[each] = self._pace.seconds(each.kind, each.work)
                begun.append(each)
        return begun

    def take(self, is_short: bool = False) -> tuple[list[W], list[tuple[W, OpenbookError]]]:
        """A batch: whose turn it is, and those behind who fit; the others keep their places. And who came too late.

        With `is_short` what may run beside the batch under way: of another key, and done in a small part of what is
        left of that. And what those ask who ask for little, whom nobody else's batch keeps waiting: also where that one
        is late for it, unless they take more than half of what it takes.
        """
        batch: list[W] = []
        n_of = self._n_of_callers()
        refused: list[tuple[W, OpenbookError]] = []
        work = 0
        for each in self.waiting():
            seconds = self._pace.seconds(each.kind, work + each.work)
            if each.is_stream:
                continue
            asks_little = self._asks_little(each, n_of)
            if is_short and not self._lets_past(each, seconds, asks_little):
                continue
            if batch:
                # Who asks for little shares no batch with who makes it long.
                if self._asks_little(batch[0], n_of) == asks_little and self._fits([*batch, each], seconds):
                    batch.append(each)
                    work += each.work
            elif not each.remaining_s:
                late = DeadlineExceeded(f"deadline passed before {self._name}")
                refused.append((each, self._counted("time", late)))
            elif self._is_hopeless(each):
                late_now = Overloaded(f"{self._name}: others came first, and now it would be late")
                refused.append((each, self._counted("time", late_now)))
            else:
                batch, work = [each], each.work
        for each, _ in refused:
            self._turns.remove(each)
        for each in batch:
            self._turns.give(each)
        if batch and (is_short or self._asks_little(batch[0], n_of)):
            self._under_way.came_before(self._seconds(batch))
        return batch, refused

    def begin(self, batch: Sequence[W], is_short: bool = False) -> None:
        """The worker computes this, beside the batch under way if it is short."""
        if is_short:
            self._under_way.let_past(self._seconds(batch))
        else:
            self._under_way.begin(batch, self._seconds(batch))

    def end(self, is_short: bool = False) -> None:
        """It does no more."""
        if is_short:
            self._under_way.went_past()
        else:
            self._under_way.end()

    def learn(self, done: Sequence[Waiting], seconds: float, is_whole: bool = True) -> None:
        """So long a batch, or a stream, took by itself; or had taken when it was stopped: that it takes longer than was
        thought, nobody would learn else where all are stopped for being late."""
        kind, work = done[0].kind, sum(each.work for each in done)
        if is_whole or seconds > self._pace.seconds(kind, work):
            self._pace.learn(kind, work, seconds, self._clock())

    def _check_in_time(self, newcomer: W) -> bool:
        """Raises Overloaded if it is not predicted to be ready in time, with those whose turn comes before. What runs
        beside the batch under way waits for no more than those who do so too, but has only a share of the time.

        The only one of a kind not seen lately, or never, counts as no time: refused, it would never be seen. Returns
        whether it is one.
        """
        waiting = self.waiting()
        of_its_kind = [w for w in (*waiting, *self._under_way.batch, *self._streams) if w.kind == newcomer.kind]
        is_tried = of_its_kind == [newcomer] and self._pace.is_doubtful(newcomer.kind, self._clock())
        first = [each for each in waiting[: waiting.index(newcomer) + 1] if not (is_tried and each is newcomer)]
        seconds = (self._seconds_of(first, newcomer) + self._under_way.left_s) * self._under_way.stretch
        if self._runs_beside(newcomer):
            n_of = self._n_of_callers()
            past = [each for each in first if each is newcomer or self._asks_little(each, n_of)]
            seconds = min(seconds, self._seconds_of(past, newcomer) / SHARE_BETWEEN)
        if SPARE * seconds > newcomer.remaining_s:
            due_s = f"{SPARE * seconds:.1f} s, and the deadline is in {newcomer.remaining_s:.1f} s"
            retry_after_s = SPARE * seconds - newcomer.remaining_s
            raise self._counted("time", Overloaded(f"{self._name}: would be done in {due_s}", retry_after_s))
        return is_tried

    def _seconds_of(self, first: Sequence[W], newcomer: W) -> float:
        """Of these, equal keys in batches together, and of the streams meanwhile."""
        of_key: dict[Hashable, list[W]] = {}
        for each in first:
            of_key.setdefault(each.key, []).append(each)
        seconds = 0.0
        for alike in of_key.values():
            work = sum(each.work for each in alike) / len(alike)
            seconds += self._seconds(alike, math.ceil(len(alike) / self._most_at_once(alike[0].kind, work)))
        return seconds + self._streams_s(newcomer, seconds)

    def _streams_s(self, newcomer: W, seconds: float) -> float:
        """How much longer what takes so many takes for the streams under way."""
        streams = self._streams.values()
        if not newcomer.is_stream:  # they have a share of the time of batches
            return min(sum(streams), seconds * SHARE_BETWEEN / (1 - SHARE_BETWEEN))
        if not self._has_place(newcomer.context.caller):  # it begins when one of them ends
            return sum(streams)
        own_s = self._pace.seconds(newcomer.kind, newcomer.work)
        return sum(min(each, own_s) for each in streams)  # step by step in turn

    def _make_room(self, newcomer: W) -> list[tuple[W, OpenbookError]]:
        """Whom it is to put out: the newest of who has most waiting. Raises Overloaded if that is the newcomer."""
        waiting = self.waiting()
        n_others = len(waiting) - 1 + len(self._streams)
        if n_others < self._max_queue:
            return []
        full = Overloaded(f"{self._name}: the queue has room for {self._max_queue}, and {n_others} wait")
        n_of = Counter(each.context.caller for each in waiting)
        caller, most = n_of.most_common(1)[0]
        if n_of[newcomer.context.caller] == most:
            raise self._counted("room", full)
        last = next(each for each in reversed(waiting) if each.context.caller == caller)
        return [(last, full)]

    def _counted(self, want: str, error: E) -> E:
        """An error that refuses somebody."""
        telemetry.refused(self._name, want).inc()
        return error

    def _is_hopeless(self, waiting: W) -> bool:
        """Whether it will be late even if its turn comes now. Never of what was not tried lately."""
        own_s = self._pace.seconds(waiting.kind, waiting.work)
        return own_s > SPARE * waiting.remaining_s and self._pace.is_sure(waiting.kind, self._clock())

    def _runs_beside(self, newcomer: W) -> bool:
        """Whether it may begin while the batch under way is computed."""
        own_s = self._pace.seconds(newcomer.kind, newcomer.work)
        return newcomer.is_stream or self._lets_past(newcomer, own_s, self._asks_little(newcomer, self._n_of_callers()))

    def _lets_past(self, waiting: W, seconds: float, asks_little: bool) -> bool:
        """Whether the batch under way lets somebody past for so long."""
        if not self._under_way.batch:
            return False
        if asks_little:
            spared_s = min(each.remaining_s for each in self._under_way.batch) - SPARE * self._under_way.left_s
            return seconds <= max(spared_s / SPARE, self._seconds(self._under_way.batch) / HEAVY)
        return waiting.key != self._under_way.batch[0].key and 0 < seconds <= self._under_way.left_s / SHORT

    def _n_of_callers(self) -> Counter[str]:
        """How many each has here, streams under way apart."""
        return Counter(each.context.caller for each in (*self.waiting(), *self._under_way.batch))

    def _has_place(self, caller: str) -> bool:
        """Whether a stream of this caller may begin. Who has a name leaves places for others, though none is here yet:
        they would wait for the end of a whole stream.
        """
        n_own = sum(each.context.caller == caller for each in self._streams)
        n_kept = self._max_batch // KEPT if caller else 0
        return len(self._streams) < self._max_batch and n_own < self._max_batch - n_kept

    def _asks_little(self, waiting: W, n_of: Counter[str]) -> bool:
        """Whether its caller has few of those here, beside another who has many."""
        return n_of[waiting.context.caller] * FEW <= max(n_of.values())

    def _seconds(self, batch: Sequence[W], n_batches: int = 1) -> float:
        return self._pace.seconds(batch[0].kind, sum(each.work for each in batch), n_batches)

    def _fits(self, batch: Sequence[W], seconds: float) -> bool:
        """Whether they may be a batch that pays and keeps all their deadlines."""
        work = sum(each.work for each in batch)
        if batch[-1].key != batch[0].key or len(batch) > self._most_at_once(batch[0].kind, work / len(batch)):
            return False
        needed_s = SPARE * seconds * self._under_way.stretch
        return all(needed_s <= each.remaining_s for each in batch)

    def _most_at_once(self, kind: Hashable, work: float) -> float:
        """How many items of so much work each are a batch at most."""
        return max(1.0, min(self._max_batch, min(self._pace.worthwhile(kind), self._max_work) / work))
