"""Python that Numba makes machine code of, for the loops between what NumPy and FAISS have a call for."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])

INTRINSIC = "llvm.prefetch.p0i8"
_prefetches = True


def compiled(*signature: str, **options: Any) -> Callable[[Function], Function]:
    """Compile a function that runs without holding Python's lock: at once if it has a signature, else with its callers.

    The machine code of the first kind is kept beside the source, or in the user's cache, for other processes, until the
    file changes: so what it calls stands there too, but for `prefetch`. Options are `numba.njit`'s.
    """

    def compile_(function: Function) -> Function:
        global _prefetches
        try:
            result = numba.njit(*signature, nogil=True, cache=bool(signature), **options)(function)
        except Exception:  # nowhere to keep it, or what was kept is damaged
            try:
                result = numba.njit(*signature, nogil=True, **options)(function)
            except Exception as error:  # perhaps `prefetch`: it builds on what Numba promises nobody
                former, _prefetches = _prefetches, False
                result = numba.njit(*signature, nogil=True, **options)(function)
                if former:
                    log.warning("vectors are not fetched before their turn, searches are slower: %s", error)
        return cast(Function, result)

    return compile_


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """As Numba wants it: the signature, and what writes the code of a call."""
    del typing_context

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _prefetches:
            _write_prefetch(context, builder, signature, arguments)
        return context.get_dummy_value()

    return numba.void(array, index), write


def _write_prefetch(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
    from llvmlite import ir
    from numba.core import cgutils

    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    line = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, INTRINSIC)
    builder.call(function, [line, number(0), number(3), number(1)])  # to read, soon and often, data


prefetch: Callable[[Any, int], None] = intrinsic(_prefetch)
"""Within compiled code: have the cache line that holds number `index` of a contiguous array fetched meanwhile, or
nothing, where Numba has become another.

It counts along the memory, whatever the dimensions, and may lie beyond the array: nothing is read.
"""
