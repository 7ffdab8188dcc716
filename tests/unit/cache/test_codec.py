"""What Redis holds: generations come back to the bit, and what no `pack` made is refused."""

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from openbook.cache.codec import EmbeddingCodec, GenerationCodec, Seal
from openbook.core.types import Classification, Generation, Token

LOG_P = st.floats(max_value=0, allow_nan=False)
CODEC = GenerationCodec()


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    k, t, c = (draw(st.integers(1, 4)) for _ in range(3))

    def log_p(*shape: int) -> Any:
        return draw(arrays(np.float64, shape, elements=LOG_P))

    labels = tuple(draw(st.lists(st.text(), min_size=c, max_size=c)))
    chosen = Classification(labels, log_p(c), log_p(c), log_p(k), log_p(c, k))
    token_ids = tuple(draw(st.lists(st.integers(0, 1 << 40), min_size=t, max_size=t)))
    tokens = tuple(Token(draw(st.text()), draw(LOG_P), tuple(log_p(k).tolist()), i, i + 1) for i in range(t))
    classification = draw(st.sampled_from([None, chosen]))
    one = Generation(draw(st.text()), token_ids, draw(LOG_P), log_p(k), log_p(k), tokens, classification)
    one = replace(one, ended=draw(st.booleans()), cut=draw(st.booleans()))
    return draw(st.sampled_from([one, replace(one, others=(one, replace(one, text=draw(st.text()))))]))


def assert_same(one: object, other: object) -> None:
    if isinstance(one, Generation | Classification):
        assert type(one) is type(other)
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple) and isinstance(other, tuple):
        for each, its_twin in zip(one, other, strict=True):
            assert_same(each, its_twin)
    elif isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())
    else:
        assert one == other


@given(generations())
def test_a_generation_comes_back_to_the_bit(generation: Generation) -> None:
    assert_same(generation, CODEC.unpack(CODEC.pack(generation)))


@pytest.mark.parametrize(
    "change",
    [
        {"log_prior": [0.0]},
        {"log_posterior": ["none", 0.0]},
        {"log_likelihood": float("nan")},
        {"tokens": [{"text": "a", "log_likelihood": 0.0, "log_posterior": [0.0], "start": 0, "end": 1}]},
        {"tokens": [{"text": "a", "log_likelihood": 0.0, "log_posterior": [0.0, 0.0], "start": None, "end": 1}]},
        {"others": [{"text": "another"}]},
        {"token_ids": 7},
        {"token_ids": [float("inf"), 1]},
        {"classification": {"labels": ["a"]}},
    ],
)
def test_what_is_no_generation_is_refused(change: dict[str, Any]) -> None:
    whole = Generation("text", (1, 2), -1.0, np.zeros(2), np.zeros(2))
    forged = json.dumps(json.loads(CODEC.pack(whole)) | change).encode()
    with pytest.raises((ValueError, KeyError, TypeError, OverflowError)):
        CODEC.unpack(forged)


@given(st.binary(max_size=64))
def test_bytes_that_are_nothing_are_refused(data: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, OverflowError)):
        CODEC.unpack(data)


def test_a_seal_belongs_to_key_value_and_secret() -> None:
    seal = Seal("a secret of some length")
    value = seal.close("key", b"data")
    assert seal.open("key", value) == b"data"
    assert seal.open("another", value) is None
    assert Seal("").open("key", value) is None
    assert seal.open("key", value + b"x") is seal.open("key", b"") is None
    assert seal.open("keyd", value[: -len(b"data")] + b"ata") is None, "none of the key's end is taken for the value's"


def test_codecs_have_keys_of_their_own() -> None:
    prefixes = {EmbeddingCodec().prefix, EmbeddingCodec("float16").prefix, CODEC.prefix}
    assert len(prefixes) == 3
