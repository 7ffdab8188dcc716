"""Questions in batches of a few fixed shapes: no faster than one by one unless each keeps the bits that it has alone.

How a product of matrices is added up may depend on its shape. So a question is always padded to the same length, alone
or in company, and whether a row of a larger batch then has the bits of a row alone is tried, not believed: it depends
on the processor and on the libraries.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from openbook.core.deadline import Check
from openbook.core.types import Float32

log = logging.getLogger(__name__)

Row = Sequence[int]
"""A question's token ids."""
Compute = Callable[[Sequence[Row], int], Float32]
"""(n, d) embeddings of n rows, padded to multiples of a length."""

LENGTHS = (16, 32, 64)
"""In tokens. Longer questions are rare, gain little by company, and are computed alone, at their own length."""
BATCH_TOKENS = 256
"""Of a batch, padding included. More are hardly faster on a core, and every shape has to be tried at the start."""


class Batches:
    """Rows computed at one of LENGTHS, 1, 2, 4 ... of them at once.

    A row is shorter than its length: a batch without padding would take another way through attention.

    Args:
        compute: what embeds them.
        max_tokens: the longest row that it can read.
        n_words: token ids are less than this.
    """

    def __init__(self, compute: Compute, max_tokens: int, n_words: int) -> None:
        self._compute = compute
        self._lengths = [length for length in LENGTHS if length < max_tokens]
        self._n_words = n_words
        self._equal: dict[int, bool] = {}  # by torch's threads, whose number is the whole process's

    def length(self, n_tokens: int) -> int:
        """At which a row of so many tokens is computed: one of LENGTHS, or any that is longer than those."""
        longer = max([n_tokens, *(length + 1 for length in self._lengths)])
        return next((length for length in self._lengths if n_tokens < length), longer)

    def embed(self, rows: Sequence[Row], check: Check) -> Iterator[tuple[list[int], Float32]]:
        """Which rows, and their embeddings: batch by batch, with a check before each."""
        by_length: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_length.setdefault(self.length(len(row)), []).append(i)
        for length, found in by_length.items():
            n_max = self._n_max(length) if len(found) > 1 and self.keep_bits() else 1
            for start in range(0, len(found), n_max):
                check()
                batch = found[start : start + n_max]
                filling = batch[:1] * (_power_of_two(len(batch)) - len(batch))
                yield batch, self._compute([rows[i] for i in batch + filling], length)[: len(batch)]

    def keep_bits(self) -> bool:
        """Whether rows have the same bits in company as alone: tried once for every number of threads."""
        n_threads = torch.get_num_threads()
        if n_threads not in self._equal:
            self._equal[n_threads] = equal = all(map(self._is_equal, self._lengths))
            how = "in batches, with the bits that each has alone" if equal else "one by one: batches change their bits"
            log.info("questions are computed %s", how)
        return self._equal[n_threads]

    def _is_equal(self, length: int) -> bool:
        """Whether batches of all sizes give each row, whatever its place, the bits that it has alone."""
        rng = np.random.default_rng(length)
        rows = [rng.integers(0, self._n_words, size).tolist() for size in (length // 4, length - 1)]
        alone = np.concatenate([self._compute([row], length) for row in rows])
        for n in (2**i for i in range(1, self._n_max(length).bit_length())):
            places = rng.integers(0, len(rows), n)
            if self._compute([rows[i] for i in places], length).tobytes() != alone[places].tobytes():
                return False
        return True

    def _n_max(self, length: int) -> int:
        return BATCH_TOKENS // length if length in self._lengths else 1


def _power_of_two(n: int) -> int:
    """The first that is at least n."""
    return 1 << (n - 1).bit_length()
