"""Python that Numba makes machine code of, for the loops between what NumPy and FAISS have a call for."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(*signature: str, **options: Any) -> Callable[[Function], Function]:
    """Compile a function, at once where it has a signature, and without holding Python's lock.

    The machine code is kept beside the source, or in the user's cache, for other processes. Options are `numba.njit`'s.
    """

    def compile_(function: Function) -> Function:
        try:
            result = numba.njit(*signature, nogil=True, cache=True, **options)(function)
        except RuntimeError:  # nowhere to keep it
            result = numba.njit(*signature, nogil=True, **options)(function)
        return cast(Function, result)

    return compile_
