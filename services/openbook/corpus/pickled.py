"""DPR's published embeddings: pickles of (id, vector) pairs, read without running what a pickle may ask for.

A pickle names functions to call. Here it gets stand-ins for the few that make up a NumPy array of numbers, written in
Python, and nothing else, whatever it names.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openbook.errors import InvalidDocuments

MAGIC = b"\x80"
FLOATS = ("f2", "f4", "f8")


class _DType:
    """As `numpy.dtype` is pickled: what it was made with, then its byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        if code not in FLOATS:
            raise pickle.UnpicklingError(f"numbers must be {', '.join(FLOATS)}, found {code!r}")
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", "="):
            raise pickle.UnpicklingError(f"numbers must be little-endian, found {state[1]!r}")


class _Array:
    """As `numpy.ndarray` is pickled: what it was made with says nothing, then shape, type, order and bytes."""

    def __init__(self, *_: Any) -> None:
        self.values: NDArray[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        self._set(content, dtype, shape, "F" if is_fortran else "C")

    def _set(self, content: Any, dtype: Any, shape: Any, order: Any) -> None:
        if not isinstance(dtype, _DType) or not isinstance(content, (bytes, bytearray)) or order != "C":
            raise pickle.UnpicklingError("an array that holds no numbers")
        self.values = np.frombuffer(content, f"<{dtype.code}").reshape(shape)


def _from_buffer(*described: Any) -> _Array:
    """As arrays are pickled in the newest protocol."""
    array = _Array()
    array._set(*described)
    return array


def _latin1(text: str, encoding: str) -> bytes:
    """As bytes are pickled in old protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes must be in latin1, found {encoding!r}")
    return text.encode(encoding)


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _DType,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _latin1,
}


class _Unpickler(pickle.Unpickler):
    """Knows no functions but those above."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _KNOWN[module, name]


def read_pairs(path: Path) -> NDArray[Any]:
    """The (n, d) vectors of a file of (id, vector) pairs, in its order. All of it is in memory meanwhile.

    Raises:
        InvalidDocuments: it holds anything else, or is cut off.
    """
    try:
        with path.open("rb") as file:
            pairs = _Unpickler(file).load()
        return np.stack([vector.values for _, vector in pairs])
    except Exception as error:  # a broken pickle raises whatever it likes
        raise InvalidDocuments(
            f"{path}: is no pickled list of (id, NumPy vector) pairs, the only pickles that are read: {error}; "
            "save such vectors as one array: numpy.save('vectors.npy', vectors)"
        ) from None
