"""How a generator reads a question with a passage. A part of the model: read otherwise than in training, it fails."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from openbook.core.types import Passage
from openbook.errors import InvalidRequest


class InputFormat(Protocol):
    """A frozen dataclass: its fields are all there is to know of it, and enter the generator's fingerprint."""

    @property
    def max_tokens(self) -> int:
        """Of question and passage together, special tokens included."""
        ...

    def encode(self, tokenizer: Any, question: str, passages: Sequence[Passage]) -> list[list[int]]:
        """Token ids of each passage with the question, at most `max_tokens`. What does not fit is cut off the passage.

        Raises:
            InvalidRequest: the question alone leaves no room for a passage.
        """
        ...


@dataclass(frozen=True, slots=True)
class RagFormat:
    """`title / passage // question`, as RAG's published checkpoints read it. There, what did not fit was cut off the
    question, which comes last; here never."""

    max_tokens: int = 300
    title_separator: str = " / "
    question_separator: str = " // "
    prefix: str = ""
    legacy: bool = False  # the question lower-cased and split at punctuation: see `checkpoint.load_generator`

    def encode(self, tokenizer: Any, question: str, passages: Sequence[Passage]) -> list[list[int]]:
        def ids(memory: str) -> list[int]:
            text = f"{self.prefix}{memory}{self.question_separator}{question}".replace("  ", " ")
            return list(tokenizer(text)["input_ids"])

        def fitting(memory: str) -> list[int]:
            whole = ids(memory)
            if len(whole) <= self.max_tokens:
                return whole
            n_chars = range(len(memory))
            too_long = bisect_right(n_chars, self.max_tokens, key=lambda n: len(ids(memory[:n])))
            return ids(memory[: too_long - 1])

        _check_room(len(ids("")), self.max_tokens)
        titles = (passage.title.removeprefix('"').removesuffix('"') for passage in passages)
        return [fitting(f"{t}{self.title_separator}{p.text}") for t, p in zip(titles, passages, strict=True)]


@dataclass(frozen=True, slots=True)
class PairFormat:
    """`question [SEP] title : passage`, as the embedded reader reads it."""

    max_tokens: int = 224

    def encode(self, tokenizer: Any, question: str, passages: Sequence[Passage]) -> list[list[int]]:
        # In lists: an empty second text by itself would be taken for none.
        _check_room(len(tokenizer([question], [""])["input_ids"][0]), self.max_tokens)
        memories = [f"{p.title} : {p.text}" if p.title else p.text for p in passages]
        return list(
            tokenizer([question] * len(memories), memories, truncation="only_second", max_length=self.max_tokens)[
                "input_ids"
            ]
        )


def _check_room(n_tokens: int, max_tokens: int) -> None:
    if n_tokens >= max_tokens:
        raise InvalidRequest(
            f"question has {n_tokens} tokens, and the generator can read {max_tokens} of question and passage together"
        )


def pad(
    rows: Sequence[Sequence[int]], pad_id: int, multiple: int = 1, at_most: int | None = None
) -> tuple[Tensor, Tensor]:
    """(n, t) token ids and their mask, int64, as long as the longest row: rounded up to a multiple within a limit."""
    sizes = np.array([len(row) for row in rows])
    longest = -(-int(sizes.max()) // multiple) * multiple
    length = max(longest if at_most is None else min(longest, at_most), 1)
    mask = np.arange(length) < sizes[:, None]
    ids = np.full(mask.shape, pad_id)
    # Rows one by one take five times as long.
    ids[mask] = np.fromiter(chain.from_iterable(rows), np.int64, int(sizes.sum()))
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))
