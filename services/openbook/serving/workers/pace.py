"""How long a model takes for a batch, learned from what batches took: admission by time goes by it. Pure, no clock."""

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

KEPT = 0.9
"""Of the weight of what was learned before, at each new batch: some ten batches count."""
N_KEYS = 64
"""Settings that are told apart; callers choose them, so they are bounded."""
BELIEVED_S = 10.0
"""What nothing new was learned of for so long may be otherwise by now."""
OUTLIER = 4.0
"""A batch that takes longer than so many times what was predicted says more of the machine than of the model."""
WASTED = 0.03
"""Of a batch's seconds, what may be fixed cost: a larger batch would hardly be cheaper, and all in it wait longer."""

DOUBT = 2.0
"""Standard errors."""


@dataclass(slots=True)
class _Line:
    """seconds = start_s + slope * work by weighted least squares; both at least 0."""

    n: float = 0.0  # batches; all six are sums over them, of weights and of weighted values
    work: float = 0.0
    seconds: float = 0.0
    work_work: float = 0.0
    work_seconds: float = 0.0
    seconds_seconds: float = 0.0
    learned_at: float = -math.inf
    tried_at: float = -math.inf

    def learn(self, work: float, seconds: float, now: float) -> None:
        self.n = KEPT * self.n + 1
        self.work = KEPT * self.work + work
        self.seconds = KEPT * self.seconds + seconds
        self.work_work = KEPT * self.work_work + work * work
        self.work_seconds = KEPT * self.work_seconds + work * seconds
        self.seconds_seconds = KEPT * self.seconds_seconds + seconds * seconds
        self.learned_at = now

    @property
    def _spread(self) -> float:
        """Of the work of batches; 0 where they were all alike, and nothing tells what any one costs from their mean."""
        spread = self.n * self.work_work - self.work**2
        return spread if spread > 1e-3 * self.work**2 else 0.0

    def fit(self) -> tuple[float, float]:
        """start_s and slope. Without spread all seconds are taken to go with the work."""
        if not self.work:
            return 0.0, 0.0
        slope = most = self.seconds / self.work
        if self._spread:
            slope = (self.n * self.work_seconds - self.work * self.seconds) / self._spread
        slope = min(max(slope, 0.0), most)
        return (self.seconds - slope * self.work) / self.n, slope

    def worthwhile(self) -> float:
        """Work beyond which a batch is hardly cheaper; inf where that is not known.

        By the least slope that may be, DOUBT standard errors below: of one large batch that happened to take long it
        would seem that none pays, and none would be made that tells otherwise.
        """
        if not self._spread or self.n <= 2:
            return math.inf
        start_s, slope = self.fit()
        squares = self.seconds_seconds - 2 * (start_s * self.seconds + slope * self.work_seconds)
        squares += self.n * start_s**2 + 2 * start_s * slope * self.work + slope**2 * self.work_work
        error = math.sqrt(max(0.0, squares) / (self.n - 2) * self.n / self._spread)
        least = max(0.0, slope - DOUBT * error)
        return (self.seconds - least * self.work) / (self.n * WASTED * least) if least else math.inf


class Pace:
    """Predicts the seconds of batches. A batch is of one key: settings, among which seconds go with the work.

    Of a key never seen it predicts what work took under all others; before anything was seen, no time.
    """

    def __init__(self) -> None:
        self._all = _Line()
        self._unseen_tried_at = -math.inf
        self._of_key: OrderedDict[Hashable, _Line] = OrderedDict()

    def learn(self, key: Hashable, work: float, seconds: float, now: float) -> None:
        """A batch of so much work took so long."""
        if self._all.n:
            seconds = min(seconds, OUTLIER * self.seconds(key, work))
        line = self._of_key.setdefault(key, _Line())
        self._of_key.move_to_end(key)
        if len(self._of_key) > N_KEYS:
            self._of_key.popitem(last=False)
        for each in (line, self._all):
            each.learn(work, seconds, now)

    def seconds(self, key: Hashable, work: float, n_batches: int = 1) -> float:
        """Of so much work in so many batches."""
        start_s, slope = self._of_key.get(key, self._all).fit()
        return n_batches * start_s + work * slope

    def worthwhile(self, key: Hashable) -> float:
        """The work of a batch beyond which more would hardly make it cheaper."""
        return self._of_key.get(key, self._all).worthwhile()

    def is_doubtful(self, key: Hashable, now: float) -> bool:
        """Whether no batch of this very key was seen lately, nor `tried`. Of keys never seen, which callers invent, one
        is doubtful at a time.
        """
        line = self._of_key.get(key)
        seen_at = self._unseen_tried_at if line is None else max(line.learned_at, line.tried_at)
        return now >= seen_at + BELIEVED_S

    def tried(self, key: Hashable, now: float) -> None:
        """One of a doubtful key was let in, whatever becomes of it."""
        if (line := self._of_key.get(key)) is None:
            self._unseen_tried_at = now
        else:
            line.tried_at = now

    def is_sure(self, key: Hashable, now: float) -> bool:
        """Whether batches of this very key were seen lately."""
        return key in self._of_key and now < self._of_key[key].learned_at + BELIEVED_S
