"""`openbook loadtest` against real endpoints whose behaviour is scripted, so that what it must measure is known."""

import asyncio
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import numpy as np
import pytest
import scripted_endpoint
from scripted_endpoint import Refused, answered, echo, grpc_endpoint, http_endpoint
from typer.testing import CliRunner

from openbook import processes
from openbook.cli import app
from openbook.errors import InvalidConfig
from openbook.loadtest import folder, histograms, knee, workers
from openbook.loadtest.outcomes import HANG, NOT_SENT, OK, REFUSED
from openbook.loadtest.result import Figures, NotKeptUp, Result, WrongReplies
from openbook.loadtest.run import measure, run
from openbook.loadtest.senders import Unreachable
from openbook.loadtest.settings import GRACE_S, LoadSettings
from openbook.v1.answer_pb2 import AnswerResponse

ENDPOINTS = pytest.mark.parametrize("endpoint", [grpc_endpoint, http_endpoint], ids=["gRPC", "HTTP"])
SHORT: dict[str, Any] = {"rate": 100, "duration_s": 0.5, "warm_up_s": 0, "arrivals": "constant", "connections": 2}


def asked(address: str, **values: Any) -> LoadSettings:
    return LoadSettings.model_validate({**SHORT, "address": address, **values})


def counts(found: Figures) -> dict[str, int]:
    return {each.status: each.n for each in found.statuses}


# --- what is known in closed form


STALL_S = 2.0


@contextmanager
def stalling() -> Iterator[str]:
    """An endpoint in a process of its own, as they are, which stalls for STALL_S a second after the first question."""
    command = [sys.executable, scripted_endpoint.__file__, "1.0", str(STALL_S)]
    process = processes.start(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        processes.end(process)


def in_theory(share: float, window_s: float) -> float:
    """Latency that this share of the questions of a window has at most, where those that arrive t into a stall wait
    STALL_S - t: the slowest (1 - share) of the window's arrived in the first (1 - share) * window_s of it."""
    return max(0.0, STALL_S - (1 - share) * window_s)


def test_a_stall_shows_in_the_percentiles_as_theory_says_and_a_closed_loop_hides_it() -> None:
    window_s = 5.0
    with stalling() as address:
        result = run(asked(address, rate=100, duration_s=window_s))
    result.check()
    found = result.measured
    assert found.latency
    assert found.n == found.latency.n == 500
    assert found.latency.p99_s == pytest.approx(in_theory(0.99, window_s), rel=0.02)  # 1.95 s
    assert found.latency.p90_s == pytest.approx(in_theory(0.90, window_s), rel=0.05)  # 1.5 s
    assert found.latency.max_s == pytest.approx(STALL_S, rel=0.02)
    assert found.latency.p50_s < 0.1  # 60 % arrived outside of the stall

    with stalling() as address:
        naive = run(asked(address, closed=1, duration_s=3.5)).measured
    assert naive.latency
    assert naive.latency.max_s == pytest.approx(STALL_S, rel=0.05)  # one question waited: that is all it saw
    assert naive.n > 200
    assert naive.latency.p99_s < found.latency.p99_s / 20
