"""The workers of a run as one: what each has summed up, added together."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

T = TypeVar("T")


class World(Protocol):
    """All workers, each of which makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Which worker this is, from 0."""
        ...

    @property
    def n_workers(self) -> int:
        """How many there are."""
        ...

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all workers, in place."""
        ...

    def of_first(self, value: T) -> T:
        """What worker 0 has."""
        ...


class Alone:
    """One worker."""

    rank = 0
    n_workers = 1

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Nothing to add."""

    def of_first(self, value: T) -> T:
        """Its own."""
        return value


class Distributed:
    """The workers of torch's process group, which must stand."""

    def __init__(self) -> None:
        self.rank, self.n_workers = dist.get_rank(), dist.get_world_size()

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """One call of the collective for each dtype: a call costs more than its bytes."""
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat: Tensor = _flatten_dense_tensors(same)  # type: ignore[no-untyped-call]
            dist.all_reduce(flat)
            parts = _unflatten_dense_tensors(flat, same)  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for tensor, total in zip(same, parts, strict=True):
                    tensor.copy_(total)

    def of_first(self, value: T) -> T:
        """Pickled: workers trust each other."""
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]
