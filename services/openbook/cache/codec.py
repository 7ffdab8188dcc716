"""Values as Redis holds them: embeddings as numbers, generations as JSON, each under a digest of its key and itself."""

import hashlib
import hmac
import json
from dataclasses import asdict
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from openbook.core.types import Classification, Float32, Float64, Generation, Token

V = TypeVar("V")

DIGEST_BYTES = 16
MAX_NORM = 1e15
"""Of an embedding: no encoder's is as long, and the scores of longer ones might be infinite."""


class Codec(Protocol[V]):
    """Values as bytes."""

    @property
    def prefix(self) -> str:
        """Of all keys. Holds the version of the format: one never reads the other's."""
        ...

    @property
    def tier(self) -> str:
        """What metrics call it."""
        ...

    def pack(self, value: V) -> bytes:
        """The value as bytes."""
        ...

    def unpack(self, data: bytes) -> V:
        """The value. Raises ValueError, KeyError, TypeError, OverflowError or RecursionError for what is none."""
        ...


class EmbeddingCodec:
    """(d,) embeddings as little-endian float32, which gives the same bits back, or as float16, at half the size.

    The 4 in the key is the version of the value's format, and of how encoders compute (see `models.batches`).
    """

    tier: Final = "redis"

    def __init__(self, dtype: str = "float32") -> None:
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self.prefix = "openbook:query:4:" if dtype == "float32" else f"openbook:query:4:{dtype}:"

    def pack(self, value: Float32) -> bytes:
        with np.errstate(over="ignore"):  # infinite then, and a miss when it is read
            return value.astype(self._dtype).tobytes()

    def unpack(self, data: bytes) -> Float32:
        embedding = np.frombuffer(data, dtype=self._dtype).astype(np.float32, copy=False)
        if not data or not np.linalg.norm(embedding.astype(np.float64)) <= MAX_NORM:  # nor is NaN
            raise ValueError("no embedding")
        return embedding


class GenerationCodec:
    """Generations as JSON, whose numbers come back as they were."""

    prefix: Final = "openbook:answer:4:"
    tier: Final = "answers-redis"

    def pack(self, value: Generation) -> bytes:
        return json.dumps(asdict(value), default=_listed, separators=(",", ":")).encode()

    def unpack(self, data: bytes) -> Generation:
        read = json.loads(data)
        return _generation(read, len(read["log_prior"]))


class Seal:
    """Binds a value to its key by a digest that depends on `secret`: who does not know it can neither alter an entry
    nor put one in another's place."""

    def __init__(self, secret: str) -> None:
        self._digest_key = hashlib.blake2b(secret.encode()).digest() if secret else b""

    def close(self, key: str, data: bytes) -> bytes:
        """The data behind their digest."""
        return self._digest(key, data) + data

    def open(self, key: str, value: bytes) -> bytes | None:
        """The data, or None for what `close` did not make of this key."""
        digest, data = value[:DIGEST_BYTES], value[DIGEST_BYTES:]
        return data if hmac.compare_digest(digest, self._digest(key, data)) else None

    def _digest(self, key: str, data: bytes) -> bytes:
        digest = hashlib.blake2b(key.encode() + b"\0", digest_size=DIGEST_BYTES, key=self._digest_key)
        digest.update(data)
        return digest.digest()


def _listed(value: Any) -> Any:
    """For what JSON does not know."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no part of a generation")


def _generation(read: Any, n: int) -> Generation:
    """One of n passages."""
    labels = read["classification"]
    return Generation(
        str(read["text"]),
        tuple(int(token) for token in read["token_ids"]),
        float(_array([read["log_likelihood"]], 1)[0]),
        _array(read["log_prior"], n),
        _array(read["log_posterior"], n),
        tuple(_token(token, n) for token in read["tokens"]),
        None if labels is None else _classification(labels, n),
        tuple(_generation(other, n) for other in read["others"]),
        bool(read["ended"]),
        bool(read["cut"]),
    )


def _token(read: Any, n: int) -> Token:
    log_likelihood, *log_posterior = _array([read["log_likelihood"], *read["log_posterior"]], 1 + n).tolist()
    return Token(str(read["text"]), log_likelihood, tuple(log_posterior), int(read["start"]), int(read["end"]))


def _classification(read: Any, n: int) -> Classification:
    c = len(read["labels"])
    return Classification(
        tuple(map(str, read["labels"])),
        _array(read["log_likelihood"], c),
        _array(read["log_probability"], c),
        _array(read["log_prior"], n),
        _array(read["log_posterior"], c, n),
    )


def _array(rows: Any, *shape: int) -> Float64:
    array = np.array(rows, np.float64)
    if array.size != np.prod(shape) or np.isnan(array).any():
        raise ValueError(f"numbers must be {shape}, none of them NaN")
    return array.reshape(shape)
