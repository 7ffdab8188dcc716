"""How many calls may be made a second time, elsewhere, while the first goes on. Pure: no clock."""

HEDGE_BUDGET = 0.05
"""Extra calls, as a share of all."""
MAX_SAVED_HEDGES = 10.0
"""How many hedges a quiet time may leave for a bad one."""


class HedgeBudget:
    """Every call pays its share for the extra ones: when all are slow, hedges add little to what makes them so."""

    def __init__(self, share: float = HEDGE_BUDGET) -> None:
        self.n_calls = 0
        self.n_hedges = 0
        self._share = share
        self._saved = 0.0

    def count_call(self) -> None:
        """One more call, which pays."""
        self.n_calls += 1
        self._saved = min(MAX_SAVED_HEDGES, self._saved + self._share)

    def take(self) -> bool:
        """Whether an extra call can be afforded; it is then spent."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        self.n_hedges += 1
        return True
