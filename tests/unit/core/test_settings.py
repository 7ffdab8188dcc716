"""Settings are refused when they are made, by name and limit."""

import pytest

from openbook.core.types import RetrievalSettings
from openbook.errors import InvalidRequest


@pytest.mark.parametrize("min_coverage", [0.0, -1.0, 1.1, float("nan")])
def test_coverage_out_of_range(min_coverage: float) -> None:
    with pytest.raises(InvalidRequest, match=f"min_coverage must be above 0, at most 1, got {min_coverage}"):
        RetrievalSettings(min_coverage=min_coverage)


def test_a_search_parameter_out_of_range() -> None:
    with pytest.raises(InvalidRequest, match=r"ef_search must be 1\.\.1048576, got 0"):
        RetrievalSettings(ef_search=0)
