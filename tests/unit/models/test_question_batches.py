"""Questions in batches: each has the bits that it has alone, or there are no batches."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tiny_encoders as tiny
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.config import EncoderSettings
from openbook.core.deadline import go_on
from openbook.core.types import Float32
from openbook.errors import DeadlineExceeded, InvalidRequest
from openbook.models.batches import BATCH_TOKENS, LENGTHS, Batches, Row
from openbook.models.encoder import TextEncoder

CLS = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
POOLING = [{"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling"} for kind in ("Transformer", "Pooling")]
QUESTIONS = st.lists(st.lists(st.sampled_from(tiny.WORDS), min_size=1, max_size=37).map(" ".join), max_size=40)


class Counting:
    """Stands in for a model: a row's embedding is its own, or depends on how many come with it."""

    def __init__(self, depends_on_company: bool = False) -> None:
        self.depends_on_company = depends_on_company
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, rows: Sequence[Row], length: int) -> Float32:
        self.shapes.append((len(rows), length))
        company = len(rows) * 1e-3 * self.depends_on_company
        return np.array([[sum(row) + company, len(row)] for row in rows], np.float32)


def embedded(batches: Batches, rows: Sequence[Row]) -> list[tuple[list[int], Float32]]:
    return list(batches.embed(rows, go_on))


def rows_of(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


@pytest.fixture(params=["pooler", "cls", "mean"], scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "pooler":
        return tiny.saved(path, tiny.dpr_model(transformers.DPRQuestionEncoder), tiny.bert_tokenizer())
    files = {"modules": POOLING, "1_Pooling__config": CLS} if request.param == "cls" else {}
    return tiny.saved(path, tiny.bert_model(), tiny.bert_tokenizer(), **files)


@pytest.fixture(params=["float32", "bfloat16", "float16"], scope="module")
def encoder(request: pytest.FixtureRequest, folder: str) -> TextEncoder:
    return TextEncoder.load(EncoderSettings(model=folder, dtype=request.param))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@settings(max_examples=25, deadline=None)
@given(QUESTIONS, st.randoms(use_true_random=False))
def test_a_question_has_the_same_bits_alone_and_in_any_company(
    encoder: TextEncoder, questions: list[str], random: Random
) -> None:
    together = encoder.encode_questions(questions)
    order = random.sample(range(len(questions)), len(questions))
    assert encoder.encode_questions([questions[i] for i in order]).tobytes() == together[order].tobytes()
    for i in order[:5]:
        assert encoder.encode_questions([questions[i]]).tobytes() == together[i].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_has_the_embedded_encoders_on_one_thread_and_on_two(dtype: str, two_threads: None) -> None:
    encoder = TextEncoder.load(EncoderSettings(dtype=dtype))
    rng = np.random.default_rng(0)
    sizes = [1, 13, 14, 29, 30, 61, 62, 80, *rng.integers(1, 60, 12)]  # with [CLS] and [SEP] at the borders of LENGTHS
    questions = [" ".join(rng.choice(tiny.WORDS[:20], size)) for size in sizes]
    for n_threads in (2, 1):
        torch.set_num_threads(n_threads)
        alone = np.concatenate([encoder.encode_questions([question]) for question in questions])
        order = rng.permutation(len(questions))
        assert encoder.encode_questions([questions[i] for i in order]).tobytes() == alone[order].tobytes()


def test_padding_changes_nothing_but_the_last_bits(folder: str) -> None:
    encoder = TextEncoder.load(EncoderSettings(model=folder))
    longest = " ".join(["moon"] * 29)  # 31 tokens: one column of padding; one word more and it is computed alone
    for question in ("moon", "who was bell", longest):
        ids = encoder._tokenizer(question)["input_ids"]
        assert encoder.padded_length(question) > len(ids)
        bare = encoder._embed([ids])[0] * np.float32(encoder.pooling.query_scale)
        np.testing.assert_allclose(encoder.encode_questions([question])[0], bare, atol=1e-5)
    assert encoder.padded_length(longest + " moon") == 33
    with pytest.raises(InvalidRequest, match="question has 41 tokens, and the encoder can read 40"):
        encoder.padded_length(" ".join(["moon"] * 39))


def test_batches_are_of_one_length_and_of_few_sizes() -> None:
    compute = Counting()
    batches = Batches(compute, max_tokens=512, n_words=100)
    assert batches.keep_bits()
    compute.shapes.clear()
    rows = rows_of(3, 15, 16, 31, 32, 5, 63, 64, 500, 7, 2, *[9] * 20)
    found = embedded(batches, rows)
    assert sorted(i for places, _ in found for i in places) == list(range(len(rows)))
    for places, embeddings in found:
        assert embeddings.tolist() == [[len(rows[i]), len(rows[i])] for i in places]
    assert compute.shapes == [(16, 16), (16, 16), (2, 32), (2, 64), (1, 65), (1, 500)]


def test_every_shape_that_is_used_was_tried(caplog: pytest.LogCaptureFixture) -> None:
    compute = Counting()
    batches = Batches(compute, max_tokens=512, n_words=100)
    with caplog.at_level(logging.INFO, "openbook.models.batches"):
        assert batches.keep_bits()
    tried = set(compute.shapes)
    for length in LENGTHS:
        for n in range(2, 2 * BATCH_TOKENS // length):
            compute.shapes.clear()
            embedded(batches, rows_of(*[length - 1] * n))
            assert set(compute.shapes) <= tried
    assert caplog.messages == ["questions are computed in batches, with the bits that each has alone"]


def test_where_bits_depend_on_the_company_each_is_computed_alone(caplog: pytest.LogCaptureFixture) -> None:
    compute = Counting(depends_on_company=True)
    batches = Batches(compute, max_tokens=512, n_words=2)
    with caplog.at_level(logging.INFO, "openbook.models.batches"):
        found = embedded(batches, rows_of(3, 15, 3, 31, 400))
    assert caplog.messages == ["questions are computed one by one: batches change their bits"]
    assert [places for places, _ in found] == [[0], [1], [2], [3], [4]]


def test_what_was_found_on_one_number_of_threads_is_not_believed_on_another(two_threads: None) -> None:
    compute = Counting()
    batches = Batches(compute, max_tokens=40, n_words=100)
    assert batches.keep_bits()
    torch.set_num_threads(1)
    compute.depends_on_company = True
    compute.shapes.clear()
    embedded(batches, rows_of(3, 3, 3))
    assert compute.shapes[-3:] == [(1, 16)] * 3


def test_lengths_beyond_the_model_are_never_used() -> None:
    compute = Counting()
    batches = Batches(compute, max_tokens=20, n_words=100)
    embedded(batches, rows_of(15, 16, 17, 20, 20))
    assert compute.shapes[-4:] == [(1, 17), (1, 17), (1, 20), (1, 20)]
    assert {length for _, length in compute.shapes} == {16, 17, 20}


def test_a_check_between_batches_stops_the_rest() -> None:
    compute = Counting()
    batches = Batches(compute, max_tokens=512, n_words=100)
    batches.keep_bits()
    compute.shapes.clear()
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise DeadlineExceeded("enough")

    with pytest.raises(DeadlineExceeded):
        list(batches.embed(rows_of(*[3] * 64), check))
    assert compute.shapes == [(16, 16)] * 2
