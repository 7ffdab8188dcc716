"""Passages on disk: their texts, and where they come from, memory mapped, so that 21 million open in no time."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import overload

from openbook.core.origin import Field
from openbook.core.types import Passage
from openbook.errors import InvalidDocuments, InvalidSnapshot
from openbook.index.disk.origins import Origins, OriginsWriter
from openbook.index.disk.strings import Strings, StringsWriter, check_strings

TEXTS = "passages.bin"
OFFSETS = "offsets.npy"
PARTS = 3  # document_id, title, text: each ends where the next begins


def write_passages(
    folder: Path, passages: Iterable[Passage], first_id: int = 0, fields: Sequence[Field] | None = None
) -> int:
    """Write a stream of passages, whose ids count up from `first_id`, through little memory. Returns how many.

    With `fields`, of which there may be none, all passages know their origin, and it is written too.

    Raises:
        InvalidDocuments: an id out of order, a text that is not UTF-8, or an origin that is missing.
    """
    n_passages = 0
    with ExitStack() as stack:
        texts = StringsWriter(folder / TEXTS, folder / OFFSETS)
        stack.callback(texts.close)
        origins = None if fields is None else OriginsWriter(folder, fields)
        if origins:
            stack.callback(origins.close)
        for passage in passages:
            if passage.id != first_id + n_passages:
                raise InvalidDocuments(f"passage ids must count up: expected {first_id + n_passages}, got {passage.id}")
            try:
                for part in (passage.document_id, passage.title, passage.text):
                    texts.append(part)
                if origins:
                    origins.append(passage)
            except UnicodeEncodeError as error:
                raise InvalidDocuments(f"passage {passage.id}: not UTF-8 text: {error}") from None
            n_passages += 1
    return n_passages


def check_offsets(folder: Path, n_passages: int) -> None:
    """As `check_strings`, of the texts of so many passages."""
    check_strings(folder / TEXTS, folder / OFFSETS, PARTS * n_passages)


class PassageReader(Sequence[Passage]):
    """The passages of a folder by position, each read when it is asked for. `first_id` is the id of the first.

    With `fields`, those that were declared, each with its origin; without, none has one.

    Raises:
        InvalidSnapshot: a file is missing or is not what `write_passages` wrote.
    """

    def __init__(self, folder: Path, first_id: int = 0, fields: Sequence[Field] | None = None) -> None:
        self._first_id = first_id
        self._texts = Strings(folder / TEXTS, folder / OFFSETS)
        if len(self._texts) % PARTS:
            raise InvalidSnapshot(f"{folder / OFFSETS}: must have {PARTS} texts a passage, found {len(self._texts)}")
        self._origins = None if fields is None else Origins(folder, fields, len(self))

    def __len__(self) -> int:
        return len(self._texts) // PARTS

    @overload
    def __getitem__(self, position: int) -> Passage: ...
    @overload
    def __getitem__(self, position: slice) -> list[Passage]: ...
    def __getitem__(self, position: int | slice) -> Passage | list[Passage]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        if not -len(self) <= position < len(self):
            raise IndexError(f"position must be 0..{len(self) - 1}, got {position}")
        position %= len(self)
        number = self._first_id + position
        try:
            document_id, title, text = self._texts.some(PARTS * position, PARTS)
            return Passage(number, document_id, title, text, self._origins[position] if self._origins else None)
        except UnicodeDecodeError as error:
            raise InvalidSnapshot(f"passage {number} is no text in UTF-8: {error.reason}") from None

    def read_singly(self) -> None:
        """See `Strings.read_singly`."""
        self._texts.read_singly()

    def undecoded(self, position: int) -> list[bytes]:
        """Document's id, title and text of a passage, for who only compares: it takes a fifth of the time."""
        return self._texts.undecoded(PARTS * position, PARTS)

    def find(self, lasting_id: str) -> int | None:
        """The position of the passage with this lasting id; None if there is none, or origins are not known."""
        candidates = self._origins.candidates(lasting_id) if self._origins else []
        return next((i for i in candidates if self[i].lasting_id == lasting_id), None)
