"""Questions in batches of a few fixed shapes, in each of which a question has the same bits.

How a product of matrices is added up may depend on its shape. So a question is always padded to the same length, alone
or in company, and with how many rows at once it has which bits is tried, not believed: it depends on the processor and
on the libraries.
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
ALONE_TOKENS = 128
"""As many may be computed for a question that comes alone: copies of it fill the smallest batch, where batches have
other bits than a row by itself. On a core with AMX, in bfloat16, four rows of 16 take half as long again as one, and 16
of them two and a half times as long; eight of 32, too, and four of them three quarters longer.
"""


def n_trial(dtype: str, length: int) -> int:
    """Of how many rows to compare the bits. In float32 every row shows that sums were added up in another order. In
    half precision most of that is lost in the next rounding: two rows of 15 tokens in five show it, nine of 63 in ten
    (on a core with AMX).
    """
    return 4 if dtype == "float32" else max(4, BATCH_TOKENS // length)


def bits(compute: Compute, rows: Sequence[Row], length: int, n: int, order: int = 0) -> list[bytes]:
    """All that each row has where n are computed at once, in one of many orders."""
    places = np.random.default_rng([order, n]).permutation(np.arange(max(n, len(rows))) % len(rows))
    batches = np.split(places, len(places) // n)
    found = np.concatenate([compute([rows[i] for i in batch], length) for batch in batches])
    return sorted({bytes([i]) + each.tobytes() for i, each in zip(places, found, strict=True)})


class Batches:
    """Rows computed at one of LENGTHS, some number of them at once.

    A row is shorter than its length: a batch without padding would take another way through attention.

    Args:
        compute: what embeds them.
        max_tokens: the longest row that it can read.
        n_words: token ids are less than this.
        dtype: in which it is computed.
    """

    def __init__(self, compute: Compute, max_tokens: int, n_words: int, dtype: str) -> None:
        self._compute = compute
        self._dtype = dtype
        self._lengths = [length for length in LENGTHS if length < max_tokens]
        self._n_words = n_words
        # By torch's threads, whose number is the whole process's, and length.
        self._tried: dict[tuple[int, int], list[int]] = {}

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
            sizes = self._sizes(length)
            while found:
                check()
                full = [n for n in sizes if n < 2 * len(found)] or sizes[:1]  # none that is hardly filled
                n = next((n for n in full if n >= len(found)), full[-1])
                batch, found = found[:n], found[n:]
                filling = batch[:1] * (n - len(batch))
                yield batch, self._compute([rows[i] for i in batch + filling], length)[: len(batch)]

    def try_all(self) -> None:
        """Find out now how many rows are computed at once, so that no question waits for it."""
        found = [(self._sizes(length), length) for length in self._lengths]
        how = ", ".join(f"{sizes[0]} to {sizes[-1]} at once up to {length - 1} tokens" for sizes, length in found)
        log.info("questions are computed %s: so each has the same bits in any company", how or "one by one")

    def _sizes(self, length: int) -> list[int]:
        """How many rows at once: numbers with all of which a row has the same bits, in any place and company."""
        if length not in self._lengths:
            return [1]
        key = torch.get_num_threads(), length
        if key not in self._tried:
            rng = np.random.default_rng(length)
            rows = [rng.integers(0, self._n_words, length - 1).tolist() for _ in range(n_trial(self._dtype, length))]
            sizes = [2**i for i in range((BATCH_TOKENS // length).bit_length())]
            found = {n: bits(self._compute, rows, length, n) for n in sizes}
            for most in reversed(sizes):
                equal = [n for n in sizes if found[n] == found[most]]
                if equal[0] * length <= ALONE_TOKENS and bits(self._compute, rows, length, most, 1) == found[most]:
                    self._tried[key] = equal
                    break
        return self._tried[key]
