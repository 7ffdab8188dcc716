"""Python that Numba makes machine code of, for the loops between what NumPy and FAISS have a call for."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(*signature: str, **options: Any) -> Callable[[Function], Function]:
    """Compile a function that runs without holding Python's lock: at once if it has a signature, else with its callers.

    The machine code of the first kind is kept beside the source, or in the user's cache, for other processes, until the
    file changes: so what it calls stands there too, but for `prefetch`. Options are `numba.njit`'s.
    """

    def compile_(function: Function) -> Function:
        try:
            result = numba.njit(*signature, nogil=True, cache=bool(signature), **options)(function)
        except Exception:  # nowhere to keep it, or what was kept is damaged
            result = numba.njit(*signature, nogil=True, **options)(function)
        return cast(Function, result)

    return compile_


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """As Numba wants it: the signature, and what writes the code of a call."""
    del typing_context

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        line = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [line.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [line, number(0), number(3), number(1)])  # to read, soon and often, data
        return context.get_dummy_value()

    return numba.void(array, index), write


prefetch: Callable[[Any, int], None] = intrinsic(_prefetch)
"""Within compiled code: have the cache line that holds number `index` of a contiguous array fetched meanwhile.

It counts along the memory, whatever the dimensions, and may lie beyond the array: nothing is read.
"""
