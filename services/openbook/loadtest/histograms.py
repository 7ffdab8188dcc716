"""Latencies as HdrHistograms: percentiles of any number of them in one size, to three digits; and logs that merge."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from hdrh.histogram import HdrHistogram

from openbook.core.types import Float64

US = 1_000_000
LONGEST_US = 3600 * US
DIGITS = 3


def histogram(latencies_s: Float64) -> HdrHistogram:
    """Of (n,) seconds, in microseconds from 1 to an hour; what is outside counts as the nearest of them."""
    found = HdrHistogram(1, LONGEST_US, DIGITS)
    values, counts = np.unique(np.clip(np.rint(latencies_s * US), 1, LONGEST_US).astype(np.int64), return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        found.record_value(value, count)
    return found


def merged(histograms: Iterable[HdrHistogram]) -> HdrHistogram:
    """The histogram of all that these are of."""
    total = HdrHistogram(1, LONGEST_US, DIGITS)
    for each in histograms:
        if each.get_total_count():  # one of nothing would make the least value 0
            total.add(each)
    return total


def write_log(path: Path, begun: float, seconds: Iterable[tuple[int, HdrHistogram]]) -> None:
    """A log in HdrHistogram's format 1.2, which its tools read: an interval for each second that has values.

    Args:
        path: Of the file.
        begun: Beginning of the run, in seconds since 1970.
        seconds: Each with its number, from 0.
    """
    # Not with the package's writer: it cuts maxima to whole seconds, and its start time fails.
    head = (
        "#[Histogram log format version 1.2]\n"
        "#Values are microseconds, Interval_Max is seconds\n"
        f"#[StartTime: {begun:.3f} (seconds since epoch)]\n"
        f"#[BaseTime: {begun:.3f} (seconds since epoch)]\n"
        '"StartTimestamp","Interval_Length","Interval_Max","Interval_Compressed_Histogram"\n'
    )
    rows = (f"{at:.3f},1.000,{of.get_max_value() / US:.6f},{of.encode().decode()}\n" for at, of in seconds)
    path.write_text(head + "".join(rows), encoding="utf-8")


def read_log(path: Path) -> HdrHistogram:
    """All intervals of a log, as one."""
    encoded = (line.rsplit(",", 1)[1] for line in path.read_text(encoding="utf-8").splitlines() if line[:1].isdigit())
    return merged(map(HdrHistogram.decode, encoded))
