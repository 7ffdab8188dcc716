"""Questions in batches: each has the same bits, whatever it comes with, or is computed alone."""

import logging
from collections.abc import Callable, Iterator, Sequence
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
from openbook.models.batches import ALONE_TOKENS, BATCH_TOKENS, LENGTHS, Batches, Row
from openbook.models.encoder import TextEncoder

CLS = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
POOLING = [{"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling"} for kind in ("Transformer", "Pooling")]
QUESTIONS = st.lists(st.lists(st.sampled_from(tiny.WORDS), min_size=1, max_size=37).map(" ".join), max_size=40)


class Counting:
    """Stands in for a model: a row's embedding is its own, and has other bits by the number of rows and its place."""

    def __init__(self, bits: Callable[[int, int], float] = lambda n, place: 0) -> None:
        self.bits = bits
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, rows: Sequence[Row], length: int) -> Float32:
        self.shapes.append((len(rows), length))
        return np.array([[sum(row), len(row) + self.bits(len(rows), i) / 16] for i, row in enumerate(rows)], np.float32)


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
    batches = Batches(compute, max_tokens=512, n_words=100, dtype="float32")
    batches.try_all()
    compute.shapes.clear()
    rows = rows_of(3, 15, 16, 31, 32, 5, 63, 64, 500, 7, 2, *[9] * 20)
    found = embedded(batches, rows)
    assert sorted(i for places, _ in found for i in places) == list(range(len(rows)))
    for places, embeddings in found:
        assert embeddings.tolist() == [[len(rows[i]), len(rows[i])] for i in places]
    assert compute.shapes == [(16, 16), (16, 16), (2, 32), (2, 64), (1, 65), (1, 500)]


@given(st.lists(st.integers(0, 3), min_size=5, max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_only_numbers_of_rows_with_which_each_has_the_same_bits_are_computed_together(
    classes: list[int], lengths: list[int]
) -> None:
    """For each number of rows, its class; in the last, bits depend on the place, but of a row alone."""
    compute = Counting(
        lambda n, place: (
            1 + place % 2 if n > 1 and classes[n.bit_length() - 1] == 3 else 4 * classes[n.bit_length() - 1]
        )
    )
    batches = Batches(compute, max_tokens=512, n_words=100, dtype="float32")
    batches.try_all()
    compute.shapes.clear()
    together = np.empty((len(lengths), 2), np.float32)
    for places, embeddings in embedded(batches, rows_of(*lengths)):
        together[places] = embeddings
    shapes = compute.shapes.copy()
    alone = np.concatenate([embedded(batches, [row])[0][1] for row in rows_of(*lengths)])
    assert together.tobytes() == alone.tobytes()
    for size in {size for size, length in shapes if length == 16}:
        fewest = min(n for n in (1, 2, 4, 8, 16) if classes[n.bit_length() - 1] == classes[size.bit_length() - 1])
        assert size == 1 or (classes[size.bit_length() - 1] != 3 and fewest * 16 <= ALONE_TOKENS)


@pytest.mark.parametrize(
    ("bits", "sizes", "said"),
    [
        ("aaaaa", [[1], [2], [4], [8], [16], [16, 4]], "1 to 16 at once up to 15 tokens, 1 to 8 at once up to 31"),
        ("aabbb", [[4], [4], [4], [8], [16], [16, 4]], "4 to 16 at once up to 15 tokens, 4 to 8 at once up to 31"),
        ("abcda", [[1], [1, 1], [1] * 4, [1] * 8, [16], [16, 1, 1, 1, 1]], "1 to 16 at once up to 15 tokens, 4 to 4"),
        ("aaaab", [[1], [2], [4], [8], [8, 8], [8, 8, 4]], "1 to 8 at once up to 15 tokens, 1 to 8 at once up to 31"),
        ("abcde", [[8], [8], [8], [8], [8, 8], [8, 8, 8]], "8 to 8 at once up to 15 tokens, 4 to 4 at once up to 31"),
    ],
)
def test_a_row_alone_fills_the_smallest_batch_that_has_the_bits_of_the_largest(
    bits: str, sizes: list[list[int]], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One letter for each number of rows, 1, 2, 4, 8, 16: those of one letter agree."""
    compute = Counting(lambda n, place: ord(bits[n.bit_length() - 1]) - ord("a"))
    batches = Batches(compute, max_tokens=512, n_words=100, dtype="float32")
    with caplog.at_level(logging.INFO, "openbook.models.batches"):
        batches.try_all()
    assert caplog.messages[0].startswith(f"questions are computed {said}")
    assert caplog.messages[0].endswith(": so each has the same bits in any company")
    for n, wanted in zip((1, 2, 4, 8, 16, 20), sizes, strict=True):
        compute.shapes.clear()
        embedded(batches, rows_of(*[9] * n))
        assert compute.shapes == [(size, 16) for size in wanted]


def test_every_shape_that_is_used_was_tried() -> None:
    compute = Counting()
    batches = Batches(compute, max_tokens=512, n_words=100, dtype="float32")
    batches.try_all()
    tried = set(compute.shapes)
    for length in LENGTHS:
        for n in range(1, 2 * BATCH_TOKENS // length):
            compute.shapes.clear()
            embedded(batches, rows_of(*[length - 1] * n))
            assert set(compute.shapes) <= tried


def test_where_bits_depend_on_the_place_each_is_computed_alone() -> None:
    compute = Counting(lambda n, place: place)
    batches = Batches(compute, max_tokens=512, n_words=2, dtype="float32")
    found = embedded(batches, rows_of(3, 15, 3, 31, 400))
    assert [places for places, _ in found] == [[0], [1], [2], [3], [4]]


def test_what_was_found_on_one_number_of_threads_is_not_believed_on_another(two_threads: None) -> None:
    compute = Counting()
    batches = Batches(compute, max_tokens=40, n_words=100, dtype="float32")
    batches.try_all()
    torch.set_num_threads(1)
    compute.bits = lambda n, place: place
    compute.shapes.clear()
    embedded(batches, rows_of(3, 3, 3))
    assert compute.shapes[-3:] == [(1, 16)] * 3


def test_lengths_beyond_the_model_are_never_used() -> None:
    compute = Counting()
    batches = Batches(compute, max_tokens=20, n_words=100, dtype="float32")
    embedded(batches, rows_of(15, 16, 17, 20, 20))
    assert compute.shapes[-4:] == [(1, 17), (1, 17), (1, 20), (1, 20)]
    assert {length for _, length in compute.shapes} == {16, 17, 20}


def test_a_check_between_batches_stops_the_rest() -> None:
    compute = Counting()
    batches = Batches(compute, max_tokens=512, n_words=100, dtype="float32")
    batches.try_all()
    compute.shapes.clear()
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise DeadlineExceeded("enough")

    with pytest.raises(DeadlineExceeded):
        list(batches.embed(rows_of(*[3] * 64), check))
    assert compute.shapes == [(16, 16)] * 2
