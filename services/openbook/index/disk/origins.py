"""Where passages come from, on disk: columns that are memory mapped, for who reads one and for who filters many.

places.npy      a row a passage: which document, characters from and to, section, page (0: none)
documents.npy   a row a document: digest, path, url
languages.npy, dates.npy, field-0000.npy ...   a number a document: what can be filtered by, a column each
strings.bin, strings.npy   the texts that other columns have the number of; 0 is the empty one, for what is not known
lasting.npy     the first 8 bytes of every lasting id, ascending
lasting_positions.npy      the passage of each of these

Documents are those of one shard, in its order. One text may have several numbers: only the last are remembered.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openbook import files
from openbook.core.origin import LASTING_DIGITS, Field, FieldType, FieldValue, Origin
from openbook.core.types import Passage
from openbook.errors import InvalidDocuments, InvalidSnapshot
from openbook.index.disk.arrays import ArrayWriter, read_array
from openbook.index.disk.strings import Strings, StringsWriter, check_strings

PLACES, DOCUMENTS, LANGUAGES, DATES = "places.npy", "documents.npy", "languages.npy", "dates.npy"
STRINGS, STRING_OFFSETS = "strings.bin", "strings.npy"
LASTING, LASTING_POSITIONS = "lasting.npy", "lasting_positions.npy"
ORIGIN_FILES = (PLACES, DOCUMENTS, LANGUAGES, DATES, STRINGS, STRING_OFFSETS, LASTING, LASTING_POSITIONS)

NUMBER = np.dtype("<i4")
KEY = np.dtype("<u8")
PLACE = np.dtype([("document", "<i4"), ("start", "<i4"), ("end", "<i4"), ("section", "<i4"), ("page", "<i4")])
DOCUMENT = np.dtype([("digest", "V32"), ("path", "<i4"), ("url", "<i4")])
COLUMN: dict[FieldType, np.dtype[Any]] = {
    FieldType.STRING: NUMBER,
    FieldType.DATE: NUMBER,
    FieldType.INT: np.dtype("<i8"),
    FieldType.FLOAT: np.dtype("<f8"),
    FieldType.BOOL: np.dtype("i1"),
}
# What stands where a document has none; of texts that is the empty one.
MISSING: dict[FieldType, Any] = {FieldType.INT: -(1 << 63), FieldType.FLOAT: np.nan, FieldType.BOOL: -1}
MOST = (1 << 31) - 1
REMEMBERED = 1 << 16
SORTED_AT_ONCE = 1 << 20

_DIGEST = re.compile(r"[0-9a-f]{64}")
_UNSORTED = files.partial_of(Path(LASTING)).name
_OURS = re.compile("|".join(map(re.escape, (*ORIGIN_FILES, _UNSORTED))) + r"|field-\d{4}\.npy")


def field_file(number: int) -> str:
    """The column of one of the declared fields."""
    return f"field-{number:04d}.npy"


def origin_files(fields: Sequence[Field]) -> tuple[str, ...]:
    """All that is written where these fields are declared."""
    return (*ORIGIN_FILES, *map(field_file, range(len(fields))))


def is_of_origins(name: str) -> bool:
    """Whether a file of this name may lie where origins are being written."""
    return _OURS.fullmatch(name) is not None


class OriginsWriter:
    """The origins of a stream of passages, through little memory. To be closed."""

    def __init__(self, folder: Path, fields: Sequence[Field]) -> None:
        self._folder = folder
        self._fields = tuple(fields)
        self._strings = StringsWriter(folder / STRINGS, folder / STRING_OFFSETS)
        self._n_strings = 0
        self._numbers: dict[str, int] = {}
        self._number("")
        self._places, self._documents, self._languages, self._dates = (
            ArrayWriter(folder / name, dtype)
            for name, dtype in ((PLACES, PLACE), (DOCUMENTS, DOCUMENT), (LANGUAGES, NUMBER), (DATES, NUMBER))
        )
        self._columns = [
            ArrayWriter(folder / field_file(number), COLUMN[field.type]) for number, field in enumerate(self._fields)
        ]
        self._lasting = ArrayWriter(folder / _UNSORTED, KEY)
        self._document: tuple[object, ...] = ()
        self._start = 0

    def append(self, passage: Passage) -> None:
        """The next passage's.

        Raises:
            InvalidDocuments: it has none, or its span or its document's digest is none.
            UnicodeEncodeError: a text is not UTF-8.
        """
        origin = passage.origin
        if origin is None:
            raise InvalidDocuments(f"passage {passage.id}: must know its origin, as the others do")
        if not 0 <= origin.start <= origin.end <= MOST:
            raise InvalidDocuments(
                f"passage {passage.id}: its span must be within 0..{MOST}, got {origin.start}..{origin.end}"
            )
        document = (passage.document_id, origin.document_digest, origin.path, origin.url, origin.language, origin.date)
        if (*document, origin.fields) != self._document or origin.start <= self._start:
            self._document = (*document, origin.fields)
            self._write_document(origin)
        self._start = origin.start
        row = len(self._documents) - 1
        self._places.append((row, origin.start, origin.end, self._number(origin.section), origin.page or 0))
        self._lasting.append(_key(passage.lasting_id))

    def close(self) -> None:
        """Write what is still held, and sort."""
        self._strings.close()
        for each in (self._places, self._documents, self._languages, self._dates, self._lasting, *self._columns):
            each.close()
        unsorted = self._folder / _UNSORTED
        _sort(self._folder, np.load(unsorted, mmap_mode="r"))
        unsorted.unlink()

    def _write_document(self, origin: Origin) -> None:
        if not _DIGEST.fullmatch(origin.document_digest):
            raise InvalidDocuments(f"a document's digest must be a SHA-256 in hex, got {origin.document_digest!r:.80}")
        self._documents.append(
            (bytes.fromhex(origin.document_digest), self._number(origin.path), self._number(origin.url))
        )
        self._languages.append(self._number(origin.language))
        self._dates.append(self._number(origin.date))
        for field, column in zip(self._fields, self._columns, strict=True):
            value = origin.fields.get(field.name)
            if field.type in MISSING:
                column.append(MISSING[field.type] if value is None else value)
            else:
                column.append(self._number(str(value or "")))

    def _number(self, text: str) -> int:
        if (number := self._numbers.get(text)) is not None:
            return number
        self._strings.append(text)
        self._n_strings += 1
        if len(self._numbers) >= REMEMBERED:
            self._numbers = {"": 0}
        self._numbers[text] = self._n_strings - 1
        return self._n_strings - 1


class Origins:
    """The origins of a folder's passages by position.

    Raises:
        InvalidSnapshot: a file is missing or is not what `OriginsWriter` wrote.
    """

    def __init__(self, folder: Path, fields: Sequence[Field], n_passages: int) -> None:
        self._folder = folder
        self._fields = tuple(fields)
        self._places = read_array(folder / PLACES, PLACE, (n_passages,))
        self._documents = read_array(folder / DOCUMENTS, DOCUMENT, (None,))
        n_documents = len(self._documents)
        self._languages, self._dates = (
            read_array(folder / name, NUMBER, (n_documents,)) for name in (LANGUAGES, DATES)
        )
        self._columns = [
            read_array(folder / field_file(number), COLUMN[field.type], (n_documents,))
            for number, field in enumerate(self._fields)
        ]
        self._strings = Strings(folder / STRINGS, folder / STRING_OFFSETS)
        self._lasting = read_array(folder / LASTING, KEY, (n_passages,))
        self._positions = read_array(folder / LASTING_POSITIONS, NUMBER, (n_passages,))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, position: int) -> Origin:
        try:
            return self._origin(position)
        except IndexError:  # which would be the end to who reads one after the other
            raise InvalidSnapshot(f"{self._folder}: the origin at {position} names what is not there") from None

    def _origin(self, position: int) -> Origin:
        row, start, end, section, page = self._places.item(position)
        digest, path, url = self._documents.item(row)
        string = self._string
        return Origin(
            document_digest=digest.hex(),
            start=start,
            end=end,
            path=string(path),
            url=string(url),
            section=string(section),
            page=page or None,
            language=string(self._languages.item(row)),
            date=string(self._dates.item(row)),
            fields=self._values(row),
        )

    def _string(self, number: int) -> str:
        return self._strings[number] if number else ""

    def candidates(self, lasting_id: str) -> list[int]:
        """The positions of the passages whose lasting id begins like this one: hardly ever more than one."""
        key = np.array(_key(lasting_id), KEY)
        first, end = (int(np.searchsorted(self._lasting, key, side)) for side in ("left", "right"))
        positions: list[int] = self._positions[first:end].tolist()
        for each in positions:
            if not 0 <= each < len(self):
                path = self._folder / LASTING_POSITIONS
                raise InvalidSnapshot(f"{path}: rows must be 0..{len(self) - 1}, found {each}")
        return positions

    def _values(self, row: int) -> dict[str, FieldValue]:
        found: dict[str, FieldValue] = {}
        for field, column in zip(self._fields, self._columns, strict=True):
            value: Any = column.item(row)
            if field.type in MISSING:
                if value != MISSING[field.type] and value == value:  # which NaN is not
                    found[field.name] = bool(value) if field.type is FieldType.BOOL else value
            elif value:
                found[field.name] = self._strings[value]
        return found


def check_origins(folder: Path, fields: Sequence[Field], n_passages: int) -> None:
    """Look whether every row names what is there, so that no fetch fails.

    Raises:
        InvalidSnapshot: one does not, or as `Origins`.
    """
    n_strings = check_strings(folder / STRINGS, folder / STRING_OFFSETS, None)
    documents = read_array(folder / DOCUMENTS, DOCUMENT, (None,))
    places = read_array(folder / PLACES, PLACE, (n_passages,))
    columns: list[tuple[str, NDArray[Any], int]] = [
        (PLACES, places["document"], len(documents)),
        (PLACES, places["section"], n_strings),
        (PLACES, places["start"], MOST + 1),
        (PLACES, places["end"], MOST + 1),
        (PLACES, places["end"] - places["start"], MOST + 1),
        (PLACES, places["page"], MOST + 1),
        (DOCUMENTS, documents["path"], n_strings),
        (DOCUMENTS, documents["url"], n_strings),
        (LASTING_POSITIONS, read_array(folder / LASTING_POSITIONS, NUMBER, (n_passages,)), n_passages),
    ]
    names = [LANGUAGES, DATES]
    for number, field in enumerate(fields):
        if field.type in MISSING:
            read_array(folder / field_file(number), COLUMN[field.type], (len(documents),))
        else:
            names.append(field_file(number))
    columns += [(name, read_array(folder / name, NUMBER, (len(documents),)), n_strings) for name in names]
    for name, column, limit in columns:
        if len(column) and not (column.min() >= 0 and column.max() < limit):
            raise InvalidSnapshot(f"{folder / name}: rows must be 0..{limit - 1}, found {column.min()}..{column.max()}")
    keys = read_array(folder / LASTING, KEY, (n_passages,))
    if (keys[1:] < keys[:-1]).any():
        raise InvalidSnapshot(f"{folder / LASTING}: must ascend, and does not")


def _key(lasting_id: str) -> int:
    return int(lasting_id.ljust(LASTING_DIGITS, "0")[:16], 16)


def _sort(folder: Path, keys: NDArray[np.uint64]) -> None:
    """Write the keys in order, with their positions: some at a time, of equal shares of all keys that there may be."""
    n_parts = 1 + len(keys) // SORTED_AT_ONCE
    ascending, positions = ArrayWriter(folder / LASTING, KEY), ArrayWriter(folder / LASTING_POSITIONS, NUMBER)
    for part in range(n_parts):
        first, end = (np.uint64((at << 64) // n_parts - (at == n_parts)) for at in (part, part + 1))
        is_last = part == n_parts - 1
        here = np.flatnonzero((keys >= first) & ((keys <= end) if is_last else (keys < end)))
        here = here[np.argsort(keys[here], kind="stable")]
        ascending.extend(keys[here])
        positions.extend(here)
    ascending.close()
    positions.close()
