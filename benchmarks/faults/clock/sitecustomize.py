"""Python's wall clock, off by what a file of one double says: on PYTHONPATH, for processes whose clock is to step."""

import mmap
import os
import struct
import time

if path := os.environ.get("OPENBOOK_BENCH_CLOCK"):
    with open(path, "rb") as file:
        _offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    _time, _time_ns = time.time, time.time_ns

    def _now() -> float:
        return _time() + float(struct.unpack("d", _offset[:8])[0])

    def _now_ns() -> int:
        return _time_ns() + int(1e9 * struct.unpack("d", _offset[:8])[0])

    time.time, time.time_ns = _now, _now_ns
