"""What waits for a model: who may come in, whose turn it is, what makes a batch. Pure: no thread, no event loop."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from openbook import telemetry
from openbook.core.deadline import SPARE, Clock
from openbook.core.turns import Turns
from openbook.errors import DeadlineExceeded, OpenbookError, Overloaded
from openbook.serving.workers.reckoning import Reckoning, Waiting
from openbook.serving.workers.under_way import Shares, UnderWay
from openbook.serving.workers.worker import SHARE_BETWEEN

SHORT = 8
"""What takes at most this part of what is left of a batch does not wait for its end."""
FEW = 2
"""Who has at most half as many here as the busiest caller asks for little. With a smaller part, one who had to wait
once, and so has two here, would no longer count as asking for little, and would wait for ever."""
HEAVY = 2
"""What takes more than this part of a batch under way must not make it late: where a batch takes hardly longer than one
question, all of it would be thrown away for one."""
KEPT = 8
"""One part in so many of the streams' places is for others than who holds the rest."""


class Load(NamedTuple):
    """What a model has to do."""

    seconds: float  # until all of it is done, as predicted
    each_s: float  # that one more takes, as one of the latest batch did


W = TypeVar("W", bound=Waiting)
E = TypeVar("E", bound=OpenbookError)


class Queue(Generic[W]):
    """Callers take turns by the work that they ask for. What cannot be ready in time does not come in.

    Args:
        name: of the model, for messages.
        max_batch: questions in a batch, and streams at once.
        max_queue: questions and streams that are here at once or are to come soon, those in the batch under way apart.
        max_work: of a batch, unless it is of one question.
    """

    def __init__(self, name: str, max_batch: int, max_queue: int, max_work: float, clock: Clock) -> None:
        self._name = name
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._reckoning = Reckoning(max_batch, max_work, clock)
        self._turns: Turns[W] = Turns()
        self._streams: dict[W, float] = {}  # under way, and the seconds that each is predicted to take
        self._under_way: UnderWay[W] = UnderWay(clock)
        self._shares = Shares()
        self._each_s = 0.0

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, waiting: W) -> bool:
        return waiting in self._turns

    def load(self) -> Load:
        """What waits, and what is under way."""
        waiting_s = self._reckoning.seconds_of_all(self.waiting(), is_filled=False)
        return Load(self._under_way.left_s + waiting_s + sum(self._streams.values()), self._each_s)

    def enter(self, newcomer: W) -> list[tuple[W, OpenbookError]]:
        """Let it wait. Returns whom it puts out.

        Raises:
            Overloaded: it would not be ready in time, or there is no room for it.
            DeadlineExceeded: it would not be if its turn were now.
        """
        newcomer.context.deadline.check(self._name)
        if self._reckoning.is_hopeless(newcomer):
            own_s = self._reckoning.seconds(newcomer)
            why = f"deadline would pass before {self._name} was done: it takes some {own_s:.1f} s"
            raise self._counted("time", DeadlineExceeded(why))
        is_next = not self._under_way and not self._streams and not len(self)
        self._turns.put(newcomer.context.caller, newcomer, newcomer.work)
        try:
            is_tried = not is_next and self._check_in_time(newcomer)
            put_out = self._make_room(newcomer)
        except OpenbookError:
            self._turns.remove(newcomer)
            raise
        if is_tried:
            self._reckoning.tried(newcomer)
        for each, full in put_out:
            self._counted("room", full)
            self._turns.remove(each)
        return put_out

    def leave(self, waiting: W) -> None:
        """It waits no longer, or its stream is over. May be called of whoever has left."""
        self._streams.pop(waiting, None)
        if waiting in self._turns:
            self._turns.remove(waiting)

    def waiting(self) -> list[W]:
        """All that wait, or have a place kept, by whose turn it is."""
        return list(self._turns.in_order())

    def streams(self) -> list[W]:
        """Those that may begin now: they are under way from here on, until they leave."""
        begun = []
        for each in self.waiting():
            if each.is_stream and each.is_here and self._has_place(each.context.caller):
                self._turns.give(each)
                self._streams[each] = self._reckoning.seconds(each)
                self._shares.give(each.context.caller, self._streams[each])
                begun.append(each)
        return begun

    def take(self, is_short: bool = False) -> tuple[list[W], list[tuple[W, OpenbookError]]]:
        """A batch: whose turn it is, and those behind who fit; the others keep their places. And who came too late.

        With `is_short` what may run beside the batch under way: of another key, and done in a small part of what is
        left of that. And what those ask who ask for little, whom nobody else's batch keeps waiting: also where that one
        is late for it, unless they take more than half of what it takes.

        Too late comes also who is in the way of a batch.
        """
        few = self._few()
        most_s = self._most_beside_s() if is_short else lambda waiting: math.inf
        here = [w for w in self.waiting() if w.is_here and not w.is_stream]
        waiting = [w for w in here if self._reckoning.seconds(w) <= most_s(w)]
        batch: list[W] = []
        refused: list[tuple[W, OpenbookError]] = []
        while waiting and not batch:
            first = waiting[0]
            late = [] if first.remaining_s and not self._reckoning.is_hopeless(first) else [first]
            if not late:
                # Who asks for little shares no batch with who makes it long.
                is_little = first.context.caller in few
                alike = [w for w in waiting if w.key == first.key and (w.context.caller in few) == is_little]
                batch, late = self._reckoning.batch_of(alike, self._under_way.stretch, most_s(first))
            for each in late:
                waiting.remove(each)
                self._turns.remove(each)
                refused.append((each, self._counted("time", self._why_late(each))))
        for each in batch:
            self._turns.give(each)
        if batch and (is_short or batch[0].context.caller in few):
            self._under_way.came_before(self._reckoning.seconds(*batch))
        return batch, refused

    def _why_late(self, waiting: W) -> OpenbookError:
        if not waiting.remaining_s:
            return DeadlineExceeded(f"deadline passed before {self._name}")
        return Overloaded(f"{self._name}: too many ask, and now too little time is left")

    def begin(self, batch: Sequence[W], is_short: bool = False) -> bool:
        """The worker computes this, beside the batch under way if it is short. Returns whether it then goes first,
        whatever part of the time went to what is short."""
        seconds = self._reckoning.seconds(*batch)
        is_first = is_short and self._is_owed(batch, seconds)
        if is_short:
            self._under_way.let_past(seconds)
        else:
            self._under_way.begin(batch, seconds)
            self._shares.begin(each.context.caller for each in batch)
        work = sum(each.work for each in batch)
        for each in batch:
            self._shares.give(each.context.caller, seconds * each.work / work)
        if is_first:
            self._shares.goes_first(seconds, {each.context.caller for each in self._under_way.batch})
        return is_first

    def _is_owed(self, batch: Sequence[W], seconds: float) -> bool:
        """Whether its callers get no further with this than those whose batch is under way.

        Else who asks for one thing after the other would have all the time, and who asks for two at once none.
        """
        end = max(self._shares.end(each.context.caller) for each in batch) + seconds
        return all(end <= self._shares.end(each.context.caller) for each in self._under_way.batch)

    def end(self, is_short: bool = False, took_s: float = 0.0) -> None:
        """It does no more, and if it is short took so long by itself."""
        if is_short:
            self._under_way.went_past(took_s)
        else:
            self._under_way.end()

    def learn(self, done: Sequence[Waiting], seconds: float, is_whole: bool = True) -> None:
        """So long a batch, or a stream, took by itself; or had taken when it was stopped."""
        self._reckoning.learn(done, seconds, is_whole)
        if is_whole:
            self._each_s = seconds / len(done)

    def _check_in_time(self, newcomer: W) -> bool:
        """Raises Overloaded if it is not predicted to be ready in time, with those whose turn comes before. What runs
        beside the batch under way waits for no more than those who do so too, but has only a share of the time unless
        it goes first, as no stream does.

        The only one of a kind not seen lately, or never, counts as no time: refused, it would never be seen. Returns
        whether it is one.
        """
        waiting = self.waiting()
        of_its_kind = [w for w in (*waiting, *self._under_way.batch, *self._streams) if w.kind == newcomer.kind]
        is_tried = of_its_kind == [newcomer] and self._reckoning.is_doubtful(newcomer)
        first = [each for each in waiting[: waiting.index(newcomer) + 1] if not (is_tried and each is newcomer)]
        seconds = (self._seconds_of(first, newcomer, is_filled=True) + self._under_way.left_s) * self._under_way.stretch
        most_s = self._most_beside_s()

        def runs_beside(waiting: W) -> bool:
            return waiting.is_stream or self._reckoning.seconds(waiting) <= most_s(waiting)

        if runs_beside(newcomer):
            past = [each for each in first if runs_beside(each)]
            past_s = self._seconds_of(past, newcomer)
            is_first = not newcomer.is_stream and self._is_owed([newcomer], past_s)
            seconds = min(seconds, past_s if is_first else past_s / SHARE_BETWEEN)
        if SPARE * seconds > newcomer.remaining_s:
            due_s = f"{SPARE * seconds:.1f} s, and the deadline is in {newcomer.remaining_s:.1f} s"
            retry_after_s = SPARE * seconds - newcomer.remaining_s
            raise self._counted("time", Overloaded(f"{self._name}: would be done in {due_s}", retry_after_s))
        return is_tried

    def _seconds_of(self, first: Sequence[W], newcomer: W, is_filled: bool = False) -> float:
        """Of these, and of the streams meanwhile."""
        seconds = self._reckoning.seconds_of_all(first, is_filled)
        return seconds + self._streams_s(newcomer, seconds)

    def _streams_s(self, newcomer: W, seconds: float) -> float:
        """How much longer what takes so many takes for the streams under way."""
        streams = self._streams.values()
        if not newcomer.is_stream:  # they have a share of the time of batches
            return min(sum(streams), seconds * SHARE_BETWEEN / (1 - SHARE_BETWEEN))
        if not self._has_place(newcomer.context.caller):  # it begins when one of them ends
            return sum(streams)
        own_s = self._reckoning.seconds(newcomer)
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

    def _most_beside_s(self) -> Callable[[W], float]:
        """How long one may take, with those of his batch, whom the batch under way is to let past; -1: not at all."""
        few, under_way, left_s = self._few(), self._under_way.batch, self._under_way.left_s
        if not under_way:
            return lambda waiting: -1.0
        spared_s = min(each.remaining_s for each in under_way) / SPARE - left_s
        little_s = max(spared_s, self._reckoning.seconds(*under_way) / HEAVY)

        def most_s(waiting: W) -> float:
            if waiting.context.caller in few:
                return little_s
            return -1.0 if waiting.key == under_way[0].key else left_s / SHORT or -1.0

        return most_s

    def _few(self) -> set[str]:
        """Who asks for little: callers with few of those here, streams under way apart, beside another with many."""
        n_of = Counter(each.context.caller for each in (*self.waiting(), *self._under_way.batch))
        most = max(n_of.values(), default=0)
        return {caller for caller, n in n_of.items() if n * FEW <= most}

    def _has_place(self, caller: str) -> bool:
        """Whether a stream of this caller may begin. Who has a name leaves places for others, though none is here yet:
        they would wait for the end of a whole stream.
        """
        n_own = sum(each.context.caller == caller for each in self._streams)
        n_kept = self._max_batch // KEPT if caller else 0
        return len(self._streams) < self._max_batch and n_own < self._max_batch - n_kept
