"""Python that Numba makes machine code of, for the loops between what NumPy and FAISS have a call for."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(*signature: str, **options: Any) -> Callable[[Function], Function]:
    """Compile a function that runs without holding Python's lock: at once if it has a signature, else with its callers.

    The machine code of the first kind is kept beside the source, or in the user's cache, for other processes, until the
    file changes: so nothing that it calls may stand in another. Options are `numba.njit`'s.
    """

    def compile_(function: Function) -> Function:
        try:
            result = numba.njit(*signature, nogil=True, cache=bool(signature), **options)(function)
        except Exception:  # nowhere to keep it, or what was kept is damaged
            result = numba.njit(*signature, nogil=True, **options)(function)
        return cast(Function, result)

    return compile_
