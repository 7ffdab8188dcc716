"""Which examples are in which batch: a pure function of seed and step, so that any worker can go on anywhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Examples computed together."""

    number: int  # within its batch, over all workers
    examples: tuple[int, ...]  # positions


def micro_batches(
    step: int, n_examples: int, batch_size: int, size: int, seed: int, rank: int = 0, n_workers: int = 1
) -> list[MicroBatch]:
    """Those of step 0, 1, ... that one worker computes. Together the workers compute the same ones, however many.

    Every epoch has its own order; a batch at its end is filled up from the next.
    """
    batch = list(_positions(range(step * batch_size, (step + 1) * batch_size), n_examples, seed))
    all_of_them = [MicroBatch(i, tuple(batch[i * size : (i + 1) * size])) for i in range(batch_size // size)]
    share = len(all_of_them) // n_workers
    return all_of_them[rank * share : (rank + 1) * share]


def _positions(places: Sequence[int], n_examples: int, seed: int) -> Iterator[int]:
    orders: dict[int, np.ndarray] = {}
    for place in places:
        epoch, within = divmod(place, n_examples)
        if epoch not in orders:
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(n_examples)
        yield int(orders[epoch][within])
