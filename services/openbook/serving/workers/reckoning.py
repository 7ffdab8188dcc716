"""What is reckoned of those who wait for a model: how many of them a batch has, and how long they take. Pure."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from openbook.core.context import Context
from openbook.core.deadline import SPARE, Clock
from openbook.serving.workers.pace import Pace

W = TypeVar("W", bound="Waiting")


@dataclass(eq=False, slots=True)
class Waiting:
    """One question's place."""

    key: Hashable  # only equal ones share a batch
    kind: Hashable  # equal for equal keys; by it the pace knows how long it takes
    work: int  # in proportion to that time, among those of a kind
    context: Context
    is_stream: bool = False  # shares no batch: goes step by step beside what else is computed
    is_here: bool = True  # or is to come soon, and has its place kept

    @property
    def remaining_s(self) -> float:
        """Until its deadline."""
        return self.context.deadline.remaining_s()


class Reckoning:
    """By what batches took until now.

    Args:
        max_batch: questions in a batch.
        max_work: of a batch, unless it is of one question.
    """

    def __init__(self, max_batch: int, max_work: float, clock: Clock) -> None:
        self._max_batch = max_batch
        self._max_work = max_work
        self._clock = clock
        self._pace = Pace()

    def learn(self, done: Sequence[Waiting], seconds: float, is_whole: bool) -> None:
        """So long a batch, or a stream, took by itself; or had taken when it was stopped: that it takes longer than was
        thought, nobody would learn else where all are stopped for being late."""
        if is_whole or seconds > self.seconds(*done):
            self._pace.learn(done[0].kind, sum(each.work for each in done), seconds, self._clock())

    def tried(self, waiting: Waiting) -> None:
        """It was let in because its kind is doubtful."""
        self._pace.tried(waiting.kind, self._clock())

    def is_doubtful(self, waiting: Waiting) -> bool:
        """Whether none of its kind was seen lately, or ever."""
        return self._pace.is_doubtful(waiting.kind, self._clock())

    def is_hopeless(self, waiting: Waiting) -> bool:
        """Whether it will be late even if its turn comes now. Never of what was not tried lately."""
        is_sure = self._pace.is_sure(waiting.kind, self._clock())
        return self.seconds(waiting) > SPARE * waiting.remaining_s and is_sure

    def seconds(self, *batch: Waiting) -> float:
        """Of all of them at once."""
        return self._pace.seconds(batch[0].kind, sum(each.work for each in batch))

    def seconds_of_all(self, waiting: Iterable[Waiting], is_filled: bool) -> float:
        """Of these, equal keys in batches together. With `is_filled` the last of several batches is full too, with
        those who come until it begins: such as the middle one of these, for one giant does not make more of them.
        """
        of_key: dict[Hashable, list[Waiting]] = {}
        for each in waiting:
            of_key.setdefault(each.key, []).append(each)
        seconds = 0.0
        for alike in of_key.values():
            most = self.most_at_once(alike)
            n_batches = math.ceil(len(alike) / most)
            works = sorted(each.work for each in alike)
            n_more = most * n_batches - len(alike) if is_filled and n_batches > 1 else 0
            work = sum(works) + n_more * works[(len(works) - 1) // 2]
            seconds += self._pace.seconds(alike[0].kind, work, n_batches)
        return seconds

    def batch_of(self, alike: Sequence[W], stretch: float, most_s: float = math.inf) -> tuple[list[W], list[W]]:
        """The first of these and those behind who fit: a batch that pays, keeps all their deadlines and takes at most
        so long. And who are in its way, unless it must be short.

        In the way is who is due so soon that with him it is less than half of what it would be if nobody were due,
        where more wait than that, and enough of them for that half. All behind would wait for one batch more, and their
        deadlines would cut the next ones shorter still. Nobody is where no such batch was seen lately.
        """
        full, _ = self._filled(alike, stretch=0.0)
        is_sure = self._pace.is_sure(alike[0].kind, self._clock())
        if is_sure and math.isinf(most_s) and len(full) < len(alike):
            half = sum(each.work for each in full) * math.ceil(len(full) / 2) / len(full)
            half_s = SPARE * stretch * self._pace.seconds(alike[0].kind, half)
            batch, hasty = self._filled(alike, stretch, least_s=half_s)
            if sum(each.work for each in batch) >= half:
                return batch, hasty
        return self._filled(alike, stretch, most_s)

    def _filled(
        self, alike: Sequence[W], stretch: float, most_s: float = math.inf, least_s: float = 0.0
    ) -> tuple[list[W], list[W]]:
        """A batch of those who have at least so long until they are due; and who would have fitted and have not."""
        kind = alike[0].kind
        most_work = min(self._max_work, self._pace.worthwhile(kind))
        batch, hasty = list[W](), list[W]()
        work, remaining_s = 0, math.inf
        for each in alike:
            if len(batch) == self._max_batch:
                break
            with_it, its_s = work + each.work, each.remaining_s
            seconds, until_s = self._pace.seconds(kind, with_it), min(remaining_s, its_s)
            if batch and (with_it > most_work or seconds > most_s or SPARE * stretch * seconds > until_s):
                continue
            if its_s < least_s:
                hasty.append(each)
            else:
                batch.append(each)
                work, remaining_s = with_it, until_s
        return batch, hasty

    def most_at_once(self, alike: Sequence[Waiting]) -> float:
        """How many of such are a batch at most."""
        work = sum(each.work for each in alike) / len(alike)
        return max(1.0, min(self._max_batch, min(self._pace.worthwhile(alike[0].kind), self._max_work) / work))
