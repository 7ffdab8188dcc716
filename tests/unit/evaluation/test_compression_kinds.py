"""The kinds of index that the experiment compression compares."""

import pytest

from openbook.experiments.compression import KINDS, made_for
from openbook.index.shard.engine import Index


@pytest.mark.parametrize("dimension", [16, 100, 256, 384, 512, 768, 1024])
def test_vectors_of_every_length_have_all_kinds(dimension: int) -> None:
    for kind in KINDS:
        Index.from_factory(made_for(kind, 10_000, dimension), dimension)


def test_what_is_put_in() -> None:
    assert made_for("IVF{n},PQ{m}x4fs", 9342, 384) == "IVF192,PQ48x4fs"
    assert made_for("IVF{n}", 100, 384) == "IVF2"
    assert made_for("PQ{m}", 100, 7) == "PQ1"
