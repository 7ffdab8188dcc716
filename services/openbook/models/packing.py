"""Passages in batches of fixed shapes: each has the bits that it has in any other company, and little is padding.

How a product of matrices is added up may depend on its shape. So a passage is always padded to the same length, a
little longer than itself, and only as many are computed at once as leave each the bits that it has alone: that is
tried, not believed, for it depends on the processor and on the libraries. On a GPU, where bits do depend on how many
there are, a batch of one length has always the same number of rows; there it is tried that a row's place in it makes no
difference.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from math import log2

import numpy as np
import torch

from openbook.core.types import Float32
from openbook.models.batches import Compute, Row, bits, n_trial

log = logging.getLogger(__name__)

STEP = 8
"""Lengths are multiples of this. Of a passage of 100 words a thirtieth is padding then; kernels are prepared for every
shape, so that each length costs memory and a trial."""
BATCH_TOKENS = 1 << 10
"""Of a batch on a CPU, about: on one core more are no faster, and half as many hardly slower."""
GPU_BATCH_TOKENS = 1 << 14
ALONE_FIRST = 1 / 32
"""A batch is tried on a CPU once so many rows for each of its tokens were computed alone. To try costs as much as a
batch or two; alone a row of 128 tokens costs a tenth more than in one, a row of 32 twice as much."""


class Packing:
    """Rows of like length computed together.

    A row is shorter than its length, because a batch without padding would take another way through attention; the
    longest rows, which cannot be, have a length of their own.

    Args:
        compute: what embeds them.
        max_tokens: the longest row that it can read.
        n_words: token ids are less than this.
        dtype: in which it is computed.
        on_cpu: where it computes.
    """

    def __init__(self, compute: Compute, max_tokens: int, n_words: int, dtype: str, on_cpu: bool) -> None:
        self._compute = compute
        self._max_tokens = max_tokens
        self._n_words = n_words
        self._dtype = dtype
        self._on_cpu = on_cpu
        self.batch_tokens = BATCH_TOKENS if on_cpu else GPU_BATCH_TOKENS
        self.alone_first = ALONE_FIRST
        # By torch's threads, whose number is the whole process's, rows and length.
        self._tried: dict[tuple[int, int, int], bool] = {}
        self._alone: Counter[tuple[int, int, int]] = Counter()

    def length(self, n_tokens: int) -> int:
        """At which a row of so many tokens is computed; beyond `max_tokens` for one that has no room for padding."""
        if n_tokens >= self._max_tokens:
            return n_tokens + 1
        return min(STEP * (n_tokens // STEP + 1), self._max_tokens)

    def embed(self, rows: Sequence[Row]) -> Iterator[tuple[list[int], Float32]]:
        """Which rows, and their embeddings: batch by batch."""
        by_length: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_length.setdefault(self.length(len(row)), []).append(i)
        for length, found in sorted(by_length.items()):
            while found:
                n = self._size(length, len(found))
                batch, found = found[:n], found[n:]
                filling = batch[:1] * (n - len(batch))
                yield batch, self._compute([rows[i] for i in batch + filling], length)[: len(batch)]

    def _size(self, length: int, n_left: int) -> int:
        """How many rows of a length to compute at once, if so many are left: a power of two; more only on a GPU."""
        most: int = 1 << round(log2(max(1, self.batch_tokens / length)))
        if not self._on_cpu:
            self._keeps_bits(most, length)  # else it says so
            return most
        n = min(most, 1 << (n_left.bit_length() - 1))
        while n > 1:
            key = torch.get_num_threads(), n, length
            if key not in self._tried and self._alone[key] < self.alone_first * n * length:
                self._alone[key] += 1
                return 1
            if self._keeps_bits(n, length):
                return n
            n //= 2
        return 1

    def _keeps_bits(self, n: int, length: int) -> bool:
        """Whether n rows at once have the same bits wherever they stand, on a CPU those of one alone: tried once."""
        if n == 1:
            return True
        key = torch.get_num_threads(), n, length
        if key not in self._tried:
            rng = np.random.default_rng(length)
            shortest = max(1, length - STEP) if length <= self._max_tokens else length - 1
            sizes = np.resize([shortest, length - 1], n_trial(self._dtype, length) if self._on_cpu else 2)
            rows = [rng.integers(0, self._n_words, size).tolist() for size in sizes]
            found = bits(self._compute, rows, length, n)
            self._tried[key] = (
                found == bits(self._compute, rows, length, 1) if self._on_cpu else len(found) == len(rows)
            )
            if not self._tried[key] and self._on_cpu:
                log.info("passages of %d tokens are computed fewer than %d at once, to keep their bits", length, n)
            elif not self._tried[key]:
                log.warning("bits of passages depend on their company: %d of %d tokens at once", n, length)
        return self._tried[key]
