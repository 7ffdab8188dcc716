"""Hits compared to the bit, wherever they were found."""

import numpy as np

from openbook.core.types import Hits


def same(ours: Hits, theirs: Hits) -> None:
    """The same passages with the same scores, in the same order."""
    np.testing.assert_array_equal(ours.ids, theirs.ids)
    np.testing.assert_array_equal(ours.scores.view(np.int32), theirs.scores.view(np.int32))
