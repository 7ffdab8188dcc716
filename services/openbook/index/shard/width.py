"""How widely one index is searched: as it was built to be, or as a search asks for."""

import math
from dataclasses import replace

from openbook.core.types import AS_BUILT, SearchParameters
from openbook.errors import InvalidRequest
from openbook.index.shard.engine import Index

EXTRA = 8
"""Candidates beyond k: mostly enough to see that nothing else can be among the best k."""
EXTRA_FACTOR = 4
"""Candidates per hit where FAISS sees only codes of the vectors."""
MAX_FACTOR = 64
"""What widening goes to."""


class Width:
    """Of the searches of one index.

    Args:
        index: that is searched.
        factory: its type, for errors.
        built: what a search without parameters takes.
        max_candidates: per query: each costs a read of its vector.
        max_times: how many times as widely as it was built it may be searched.
    """

    def __init__(
        self, index: Index, factory: str, built: SearchParameters, max_candidates: int, max_times: float = math.inf
    ) -> None:
        self.built = built
        self._index = index
        self._factory = factory
        self._max_candidates = max_candidates
        self._max_times = max_times

    def check(self, k: int, parameters: SearchParameters) -> None:
        """Raises InvalidRequest for a parameter that this index has not, or that goes too far."""
        known = () if self._index.is_flat else (*self._index.knows, "rerank_factor")
        for name in ("nprobe", "ef_search", "rerank_factor"):
            if name not in known and getattr(parameters, name) is not None:
                what = f"only {' and '.join(known)}" if known else "no search parameters: it is exact"
                raise InvalidRequest(f"an index of type {self._factory} takes {what}, got {name}")
        if k * (parameters.rerank_factor or 1) > self._max_candidates:
            limit = f"at most {self._max_candidates}"
            raise InvalidRequest(f"k * rerank_factor must be {limit}, got {k} * {parameters.rerank_factor}")
        for name, (asked, built) in self._compared(parameters).items():
            if asked > self._max_times * built:
                limit = f"at most {self._max_times * built}, {self._max_times} times as built (index_server.max_width)"
                raise InvalidRequest(f"{name} must be {limit}, got {getattr(parameters, name)}")

    def filled(self, parameters: SearchParameters) -> SearchParameters:
        """The parameters, their gaps as built."""
        if parameters == AS_BUILT:
            return self.built
        return SearchParameters(
            nprobe=parameters.nprobe or self.built.nprobe,
            ef_search=parameters.ef_search or self.built.ef_search,
            rerank_factor=parameters.rerank_factor or self.built.rerank_factor,
        )

    def n_candidates(self, k: int, parameters: SearchParameters) -> int:
        """Of how many the best k are taken, by exact scores, where there are so many; the parameters are filled."""
        return min(self._max_candidates, max(k + EXTRA, self._factor(parameters) * k))

    def times(self, parameters: SearchParameters) -> float:
        """How many times as widely as built these parameters search, at least 1."""
        if parameters == AS_BUILT:
            return 1.0
        return max(1.0, *(asked / built for asked, built in self._compared(parameters).values()))

    def wider(self, parameters: SearchParameters) -> SearchParameters | None:
        """About twice as wide as these parameters; None if nothing is."""
        wide = self._index.wider(parameters)
        if not self._index.keeps_vectors:
            wide = replace(wide, rerank_factor=min(2 * (parameters.rerank_factor or EXTRA_FACTOR), MAX_FACTOR))
        return wide if wide != parameters else None

    def _compared(self, parameters: SearchParameters) -> dict[str, tuple[int, int]]:
        """Of each parameter what a search with these takes, as far as it goes, and what one as built."""
        asked, built = self.filled(parameters), self.built
        compared = {name: (self._index.reach(asked), self._index.reach(built)) for name in self._index.knows}
        return compared | {"rerank_factor": (self._factor(asked), self._factor(built))}

    def _factor(self, parameters: SearchParameters) -> int:
        return parameters.rerank_factor or (1 if self._index.keeps_vectors else EXTRA_FACTOR)
