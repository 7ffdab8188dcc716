"""Python that Numba makes machine code of, for the loops between what NumPy and FAISS have a call for."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.extending import intrinsic

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])

INTRINSIC = "llvm.prefetch.p0i8"
BLOCK = 128
"""Numbers that `dot` takes at once: their sums are independent, and fill several of the widest registers."""
_writes_code = True


def compiled(*signature: str, **options: Any) -> Callable[[Function], Function]:
    """Compile a function that runs without holding Python's lock: at once if it has a signature, else with its callers.

    The machine code of the first kind is kept beside the source, or in the user's cache, for other processes, until the
    file changes: so what it calls stands there too, but for `prefetch` and `dot`. Options are `numba.njit`'s.
    """

    def compile_(function: Function) -> Function:
        global _writes_code
        try:
            result = numba.njit(*signature, nogil=True, cache=bool(signature), **options)(function)
        except Exception:  # nowhere to keep it, or what was kept is damaged
            try:
                result = numba.njit(*signature, nogil=True, **options)(function)
            except Exception as error:  # perhaps `prefetch` or `dot`: they build on what Numba promises nobody
                former, _writes_code = _writes_code, False
                result = numba.njit(*signature, nogil=True, **options)(function)
                if former:
                    log.warning(
                        "searches are slower: nothing is fetched before its turn or multiplied at once: %s", error
                    )
        return cast(Function, result)

    return compile_


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """As Numba wants it: the signature, and what writes the code of a call."""
    del typing_context

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _writes_code:
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


def _dot(typing_context: Any, query: Any, codes: Any) -> Any:
    """As `_prefetch`."""
    del typing_context
    found = numba.types.UniTuple(numba.int64, 2)

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        none = context.get_constant(numba.int64, 0)
        parts = _write_dot(context, builder, signature, arguments) if _writes_code else (none, none)
        return context.make_tuple(builder, found, parts)

    return found(query, codes), write


def _write_dot(context: Any, builder: Any, signature: Any, arguments: Any) -> tuple[Any, Any]:
    from llvmlite import ir
    from numba.core import cgutils

    made = zip(signature.args, arguments, strict=True)
    arrays = [context.make_array(kind)(context, builder, array) for kind, array in made]
    n = builder.extract_value(arrays[0].shape, 0)
    done = builder.sub(n, builder.srem(n, n.type(BLOCK)))
    sums = ir.VectorType(ir.IntType(32), BLOCK)
    total = cgutils.alloca_once_value(builder, ir.Constant(sums, None))
    with cgutils.for_range_slice(builder, n.type(0), done, n.type(BLOCK), n.type) as (at, _):
        factors = []
        for array, n_bytes in zip(arrays, (2, 1), strict=True):
            block = ir.VectorType(ir.IntType(8 * n_bytes), BLOCK).as_pointer()
            pointer = builder.bitcast(builder.gep(array.data, [at]), block)
            factors.append(builder.sext(builder.load(pointer, align=n_bytes), sums))
        builder.store(builder.add(builder.load(total), builder.mul(*factors)), total)
    kind = ir.FunctionType(ir.IntType(32), [sums])
    add_up = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.add.v{BLOCK}i32")
    return builder.sext(builder.call(add_up, [builder.load(total)]), n.type), done


prefetch: Callable[[Any, int], None] = intrinsic(_prefetch)
"""Within compiled code: have the cache line that holds number `index` of a contiguous array fetched meanwhile, or
nothing, where Numba has become another.

It counts along the memory, whatever the dimensions, and may lie beyond the array: nothing is read.
"""
dot: Callable[[Any, Any], tuple[int, int]] = intrinsic(_dot)
"""Within compiled code: of two contiguous arrays of one length, of 16 and of 8 bits, the inner product of the first
numbers, in 32 bits, and of how many: all but the last that fill no BLOCK; none where Numba has become another.

By itself LLVM multiplies as many at once as there are sums of 32 bits in a register, 8, where processors can 32.
"""
