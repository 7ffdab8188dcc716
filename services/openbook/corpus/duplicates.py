"""Passages that say once more what one before them says: found as they are read, and left out if that is wanted."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from openbook.core.types import Passage
from openbook.errors import InvalidConfig

What = Literal["keep", "report", "drop"]
ALIKE = 0.8
"""Of all runs of three words that two passages have, the share that both have, as it is estimated: of a hundred words
about three may be others."""
RUN = 3
N_HASHES = 128
N_SHOWN = 10


class Pair(BaseModel, frozen=True):
    """A passage, and the one before it."""

    document: str
    of: str  # the document of the other
    text: str  # how it begins


class Repeated(BaseModel):
    """What was found."""

    n_read: int = 0
    n_equal: int = 0
    """To one before them, but for capitals and white space."""
    n_near: int = 0
    first: list[Pair] = []


class Duplicates:
    """Remembers all passages that it has seen and kept: about 4 KB of memory each.

    Raises:
        InvalidConfig: datasketch is not installed.
    """

    def __init__(self) -> None:
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError:
            raise InvalidConfig("duplicates need datasketch: pip install 'openbook[corpus]'") from None
        self.found = Repeated()
        self._min_hash = MinHash
        self._near = MinHashLSH(threshold=ALIKE, num_perm=N_HASHES)
        self._equal: dict[bytes, int] = {}
        self._kept: list[tuple[str, Any]] = []  # document and hashes of each

    def marked(self, passages: Iterable[Passage]) -> Iterator[tuple[Passage, bool]]:
        """Each passage, and whether it repeats one that did not itself."""
        for passage in passages:
            other = self._other(passage)
            self.found.n_read += 1
            if other is not None and len(self.found.first) < N_SHOWN:
                of, _ = self._kept[other]
                self.found.first.append(Pair(document=passage.document_id, of=of, text=passage.text[:80]))
            yield passage, other is not None

    def _other(self, passage: Passage) -> int | None:
        """The number of the first one that says the same; if there is none, this one is kept."""
        words, number = passage.text.lower().split(), len(self._kept)
        other = self._equal.setdefault(blake2b(" ".join(words).encode(), digest_size=16).digest(), number)
        if other != number:
            self.found.n_equal += 1
            return other
        hashes = self._min_hash(num_perm=N_HASHES)
        hashes.update_batch([" ".join(words[i : i + RUN]).encode() for i in range(max(1, len(words) - RUN + 1))])
        values = hashes.hashvalues.astype(np.uint32)  # they have 32 bits
        for candidate in sorted(self._near.query(hashes)):
            if np.mean(self._kept[candidate][1] == values) >= ALIKE:
                self.found.n_near += 1
                self._equal.popitem()  # the next one that equals this one is compared with that one too
                return int(candidate)
        self._near.insert(number, hashes, check_duplication=False)
        self._kept.append((passage.document_id, values))
        return None


def without(marked: Iterable[tuple[Passage, bool]]) -> Iterator[Passage]:
    """Those that do not repeat another, numbered from 0."""
    number = 0
    for passage, is_repeated in marked:
        if not is_repeated:
            yield replace(passage, id=number)
            number += 1
