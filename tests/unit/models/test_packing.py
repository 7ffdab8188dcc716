"""Passages in batches: each has the bits that it has alone, at a length little above its own."""

import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tiny_encoders as tiny
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.config import EncoderSettings
from openbook.core.types import Float32, Passage
from openbook.models.batches import Row
from openbook.models.encoder import TextEncoder
from openbook.models.packing import BATCH_TOKENS, GPU_BATCH_TOKENS, STEP, Packing

TEXTS = st.lists(st.lists(st.sampled_from(tiny.WORDS), max_size=60).map(" ".join), max_size=30)


class Counting:
    """Stands in for a model: a row's embedding is its own, or depends on how many come with it, or on its place; or it
    does so for one row of `rare` only.
    """

    def __init__(self, company: bool = False, place: bool = False, rare: int = 1) -> None:
        self.company, self.place, self.rare = company, place, rare
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, rows: Sequence[Row], length: int) -> Float32:
        self.shapes.append((len(rows), length))
        by = [1e-3 * (len(rows) * self.company + i * self.place) for i in range(len(rows))]
        of = [sum(row) + each * (sum(row) % self.rare == 0) for each, row in zip(by, rows, strict=True)]
        return np.array([[number, len(row)] for number, row in zip(of, rows, strict=True)], np.float32)


def rows_of(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


def packing(compute: Counting, on_cpu: bool = True, max_tokens: int = 256, dtype: str = "float32") -> Packing:
    return Packing(compute, max_tokens, n_words=100, dtype=dtype, on_cpu=on_cpu)


def embedded(packing: Packing, rows: Sequence[Row]) -> list[int]:
    """Which rows there are embeddings of, in the order of batches."""
    found = []
    for places, embeddings in packing.embed(rows):
        assert [length for _, length in embeddings.tolist()] == [len(rows[i]) for i in places]
        found += places
    return found


@pytest.fixture(params=["pooler", "mean"], scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "pooler":
        return tiny.saved(path, tiny.dpr_model(transformers.DPRContextEncoder), tiny.bert_tokenizer())
    # So wide that a few rows show if their sums are added up in another order.
    return tiny.saved(path, tiny.bert_model(hidden_size=64, intermediate_size=128), tiny.bert_tokenizer())


@pytest.fixture(params=["float32", "bfloat16"], scope="module")
def encoder(request: pytest.FixtureRequest, folder: str) -> TextEncoder:
    encoder = TextEncoder.load(EncoderSettings(model=folder, dtype=request.param, n_threads=1), "passage")
    encoder._packing.batch_tokens = 64  # so that a few texts are more than one batch
    encoder._packing.alone_first = 0
    return encoder


@settings(max_examples=25, deadline=None)
@given(TEXTS, st.randoms(use_true_random=False))
def test_a_passage_has_the_same_bits_alone_and_in_any_company(
    encoder: TextEncoder, texts: list[str], random: Random
) -> None:
    passages = [Passage(i, "", "moon", text) for i, text in enumerate(texts)]
    together = encoder.encode_passages(passages)
    order = random.sample(range(len(texts)), len(texts))
    assert encoder.encode_passages([passages[i] for i in order]).tobytes() == together[order].tobytes()
    for i in order[:5]:
        assert encoder.encode_passages([passages[i]]).tobytes() == together[i].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_has_the_embedded_encoders(dtype: Any) -> None:
    encoder = TextEncoder.load(EncoderSettings(dtype=dtype, n_threads=1), "passage")
    encoder._packing.alone_first = 0
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(98, 102, 12), 5, 251, 252, 253, 300, 300]  # the last ones fill all that it can read
    passages = [Passage(i, "", "Title", " ".join(rng.choice(tiny.WORDS[:20], n))) for i, n in enumerate(sizes)]
    together = encoder.encode_passages(passages)
    for i, passage in enumerate(passages):
        assert encoder.encode_passages([passage]).tobytes() == together[i].tobytes()


def test_batches_are_of_one_length_and_tried_once_enough_were_computed_alone() -> None:
    compute = Counting()
    under_test = packing(compute)
    rows = rows_of(*[127] * 13, 128, 7, 0, 256, 255, 250)
    once = [*[(1, 8)] * 2, *[(1, 128)] * 13, (1, 136), *[(1, 256)] * 2, (1, 257)]
    assert sorted(embedded(under_test, rows)) == list(range(len(rows)))
    assert compute.shapes == once
    for _ in range(16):
        embedded(under_test, rows)
    compute.shapes.clear()
    embedded(under_test, rows)
    assert compute.shapes == [(2, 8), (8, 128), (4, 128), (1, 128), (1, 136), (2, 256), (1, 257)]
    assert BATCH_TOKENS == 8 * 128
    assert {under_test.length(n) - n for n in range(248)} == set(range(1, STEP + 1))
    assert [packing(compute, max_tokens=37).length(n) for n in (31, 32, 36, 37)] == [32, 37, 37, 38]
    assert embedded(packing(compute, max_tokens=8192), rows_of(3 * BATCH_TOKENS)) == [0]


def test_where_bits_depend_on_the_company_each_is_computed_alone(caplog: pytest.LogCaptureFixture) -> None:
    compute = Counting(company=True)
    under_test = packing(compute)
    under_test.alone_first = 0
    with caplog.at_level(logging.INFO, "openbook.models.packing"):
        embedded(under_test, rows_of(*[100] * 9))
    said = [f"passages of 104 tokens are computed fewer than {n} at once, to keep their bits" for n in (8, 4, 2)]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", text) for text in said]
    compute.shapes.clear()
    embedded(under_test, rows_of(*[100] * 9))
    assert compute.shapes == [(1, 104)] * 9


@pytest.mark.parametrize("by", [{"company": True}, {"place": True}])
def test_what_rounding_hides_from_most_rows_is_found(by: dict[str, bool]) -> None:
    for length in (7, 15, 31):
        compute = Counting(rare=4, **by)
        under_test = packing(compute, dtype="bfloat16")
        under_test.alone_first = 0
        embedded(under_test, rows_of(*[length] * 70))
        compute.shapes.clear()
        embedded(under_test, rows_of(*[length] * 70))
        assert {n for n, _ in compute.shapes} <= {1, 2}


def test_on_a_gpu_every_batch_of_a_length_has_the_same_number_of_rows(caplog: pytest.LogCaptureFixture) -> None:
    compute = Counting(company=True)
    with caplog.at_level(logging.WARNING, "openbook.models.packing"):
        embedded(packing(compute, on_cpu=False), rows_of(*[100] * 3, 30))
        assert set(compute.shapes) == {(GPU_BATCH_TOKENS // 128, 104), (GPU_BATCH_TOKENS // 32, 32)}
        assert not caplog.messages
        embedded(packing(Counting(place=True), on_cpu=False), rows_of(100))
    assert caplog.messages == ["bits of passages depend on their company: 128 of 104 tokens at once"]


def test_what_was_found_on_one_number_of_threads_is_not_believed_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Counting()
    under_test = packing(compute)
    under_test.alone_first = 0
    embedded(under_test, rows_of(100, 100))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    compute.company = True
    compute.shapes.clear()
    embedded(under_test, rows_of(100, 100))
    assert compute.shapes[-2:] == [(1, 104)] * 2
