"""`openbook loadtest` against real endpoints whose behaviour is scripted, so that what it must measure is known."""

import asyncio
import csv
import dataclasses
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, ClassVar

import grpc
import numpy as np
import pytest
import scripted_endpoint
from aiohttp import ClientTimeout, web
from aiohttp.test_utils import TestServer
from scripted_endpoint import Ended, Refused, answered, caller, echo, grpc_endpoint, http_endpoint, peer
from typer.testing import CliRunner

from openbook import processes
from openbook.cli import app
from openbook.errors import InvalidConfig, InvalidRequest
from openbook.loadtest import folder, grpc_sender, histograms, http_sender, knee, pictures
from openbook.loadtest.outcomes import BROKEN, HANG, NOT_SENT, OK, REFUSED, Reply
from openbook.loadtest.part import part
from openbook.loadtest.result import Figures, NotKeptUp, Result, WrongReplies
from openbook.loadtest.run import measure, run
from openbook.loadtest.senders import Sender, Unreachable
from openbook.loadtest.settings import GRACE_S, MIN_ON_TIME, LoadSettings
from openbook.v1.answer_pb2 import AnswerResponse

Endpoint = Callable[[scripted_endpoint.Script], AbstractAsyncContextManager[str]]
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


WINDOW_S, RATE = 5.0, 50
"""So few that those who waited for the end of the stall are answered at once, however busy the machine is."""
N_TRIES = 4
"""Of what is measured in time: a busy machine disturbs one, and a wrong measure is wrong in all."""


@contextmanager
def yardstick(latest_s: list[float]) -> Iterator[None]:
    """How much too late a thread that only sleeps is woken, at worst: what the machine does to all that is timed."""

    def sleep() -> None:
        while not over.is_set():
            before = monotonic()
            time.sleep(0.005)
            latest_s[-1] = max(latest_s[-1], monotonic() - before - 0.005)

    over = threading.Event()
    latest_s.append(0.0)
    thread = threading.Thread(target=sleep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_stall_shows_in_the_percentiles_as_theory_says() -> None:
    wanted = {
        "p99_s": pytest.approx(in_theory(0.99, WINDOW_S), rel=0.02),  # 1.95 s
        "p90_s": pytest.approx(in_theory(0.90, WINDOW_S), rel=0.05),  # 1.5 s
        "max_s": pytest.approx(STALL_S, rel=0.02),
    }
    latest_s: list[float] = []
    for _ in range(N_TRIES):
        with stalling() as address, yardstick(latest_s):
            found = run(asked(address, rate=RATE, duration_s=WINDOW_S)).measured
        assert found.latency
        assert found.n == found.latency.n == RATE * WINDOW_S
        got = {name: getattr(found.latency, name) for name in wanted}
        if got == wanted and found.on_time == 1.0:
            break
    if got != wanted and min(latest_s) > 0.02:
        pytest.skip(
            f"too busy a machine to check 2 %: in every try a thread that slept woke {min(latest_s):.3f} s late"
        )
    assert got == wanted
    assert found.latency.p50_s < 0.5  # 60 % arrived outside of the stall


def test_a_closed_loop_hides_the_same_stall() -> None:
    """Coordinated omission: its one caller waits, so one question is slow, and nobody asks those that would be."""
    with stalling() as address:
        naive = run(asked(address, closed=1, duration_s=3.5)).measured
    assert naive.latency
    assert naive.latency.max_s > 0.9 * STALL_S
    assert naive.n > 100
    assert naive.latency.p99_s < in_theory(0.99, WINDOW_S) / 10


# --- what became of the questions


@ENDPOINTS
@pytest.mark.parametrize("what", ["answer", "stream", "retrieve"])
def test_answers_are_counted_compared_and_timed(endpoint: Endpoint, what: str) -> None:
    async def script(question: str) -> AnswerResponse:
        return answered(question.upper())

    async def measured() -> Figures:
        async with endpoint(script) as address:
            return (await measure(asked(address, what=what, check="bits", warm_up_s=0.2))).measured

    found = asyncio.run(measured())
    assert counts(found) == {OK: 50}
    assert found.statuses[0].seen == ({"200": 50} if endpoint is http_endpoint else {OK: 50})
    assert found.offered_rate == found.answered_rate == found.goodput_rate == 100.0
    assert found.good_share == 1.0
    assert found.n_checked > 10
    assert found.n_wrong == 0
    assert (found.first_token is not None) == (what == "stream")
    assert found.latency
    assert found.latency.n == 50


@ENDPOINTS
def test_no_proxy_is_asked_for_this_machine_and_a_reply_may_be_large(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def script(question: str) -> AnswerResponse:
        return answered("x" * (5 << 20))  # by itself gRPC takes 4 MB

    async def measured() -> Figures:
        async with endpoint(script) as address:
            return (await measure(asked(address, duration_s=0.02))).measured

    assert counts(asyncio.run(measured())) == {OK: 2}


@ENDPOINTS
def test_the_request_says_what_was_asked_for(endpoint: Endpoint, tmp_path: Path) -> None:
    seen: list[str] = []
    callers: set[str] = set()

    async def script(question: str) -> AnswerResponse:
        seen.append(question)
        callers.add(caller.get())
        return answered("")

    async def measured() -> None:
        async with endpoint(script) as address:
            await measure(asked(address, questions=questions, replay=True, duration_s=0.05, caller="me"))

    questions = tmp_path / "questions.txt"
    questions.write_text("who?\n\nwhere?\nwhen?\n")
    asyncio.run(measured())
    assert callers == {"me"}
    assert sorted(seen) == sorted(["who?", "where?", "when?", "who?", "where?"])


def streamed(linger_s: float, **values: Any) -> tuple[Figures, int]:
    """What was measured over HTTP, and on how many connections."""

    async def script(question: str) -> AnswerResponse:
        peers.add(peer.get())
        return answered(question)

    async def measured() -> Figures:
        async with http_endpoint(script, linger_s) as address:
            return (await measure(asked(address, what="stream", **values))).measured

    peers: set[object] = set()
    return asyncio.run(measured()), len(peers)


def test_a_stream_is_read_to_its_end_so_that_its_connection_serves_the_next() -> None:
    found, n_connections = streamed(0.1, closed=1, duration_s=0.8)
    assert found.n > 2
    assert n_connections == 1
    assert found.latency
    assert found.latency.p50_s < 0.1  # the answer was there before


def test_a_stream_that_does_not_end_after_its_answer_is_answered_all_the_same() -> None:
    found, n_connections = streamed(30.0, rate=10, timeout_s=0.2)
    assert counts(found) == {OK: 5}
    assert n_connections == 5
    assert found.latency
    assert found.latency.p50_s < 0.2


@pytest.mark.parametrize(("linger_s", "n_whole"), [(0.1, 5), (30.0, 0)])
def test_over_grpc_too_a_stream_is_read_to_its_end_unless_that_does_not_come(linger_s: float, n_whole: int) -> None:
    async def measured() -> Figures:
        async with grpc_endpoint(echo, linger_s=linger_s, on_end=lambda: whole.append(1)) as address:
            return (await measure(asked(address, what="stream", rate=10, timeout_s=0.5))).measured

    whole: list[int] = []
    found = asyncio.run(measured())
    assert counts(found) == {OK: 5}
    assert len(whole) == n_whole
    assert found.latency
    assert found.latency.p50_s < 0.1  # the answer was there before


def opened(settings: LoadSettings) -> AbstractAsyncContextManager[Sender]:
    """Who sends, and has one question."""
    module = http_sender if settings.is_http else grpc_sender
    return module.opened(settings, ["who?"])


@ENDPOINTS
def test_a_first_token_is_none_of_the_passages_that_come_before_and_a_stream_without_answer_is_none(
    endpoint: Endpoint,
) -> None:
    async def script(question: str) -> AnswerResponse:
        await asyncio.sleep(0.1)
        decided.append(monotonic())
        if len(decided) > 1:
            raise Ended
        return answered(question)

    async def sent() -> list[Reply]:
        async with endpoint(script) as address, opened(asked(address, what="stream")) as sender:
            return [await sender.send(0) for _ in range(2)]

    decided: list[float] = []
    whole, ended = asyncio.run(sent())
    assert whole.status == OK
    assert whole.first >= decided[0]
    assert (ended.status, ended.message) == (BROKEN, "the stream ended without an answer")


@ENDPOINTS
def test_to_the_bit_scores_and_priors_are_compared_where_the_same_shards_answered(endpoint: Endpoint) -> None:
    usual, scored, weighed, partial = (answered("a") for _ in range(4))
    scored.evidence[0].score += 2**-50
    weighed.evidence[0].log_prior -= 2**-50
    partial.coverage.missing_shards.append(1)
    answers = iter((usual, scored, weighed, partial))

    async def script(question: str) -> AnswerResponse:
        return next(answers)

    async def sent() -> list[Reply]:
        async with endpoint(script) as address, opened(asked(address, check="bits")) as sender:
            return [await sender.send(0) for _ in range(4)]

    first, *others = asyncio.run(sent())
    assert [each.digest == first.digest for each in others] == [False, False, True]
    assert [each.about == first.about for each in others] == [True, True, False]


@pytest.mark.parametrize(("endpoint", "n_asked", "n_connections"), [(grpc_endpoint, 6, 3), (http_endpoint, 101, 101)])
def test_over_grpc_there_are_as_many_connections_as_said_and_over_http_as_it_takes(
    endpoint: Endpoint, n_asked: int, n_connections: int
) -> None:
    async def script(question: str) -> AnswerResponse:
        peers.add(peer.get())
        await together.wait()
        return answered(question)

    async def sent() -> None:
        async with endpoint(script) as address, opened(asked(address, connections=3)) as sender:
            async with asyncio.timeout(60):  # else for ever, where some wait for a connection
                await asyncio.gather(*(sender.send(0) for _ in range(n_asked)))
            if endpoint is http_endpoint:  # nor does aiohttp end what the endpoint takes long for
                assert sender._session.timeout == ClientTimeout(total=None)  # type: ignore[attr-defined]

    peers: set[object] = set()
    together = asyncio.Barrier(n_asked)
    asyncio.run(sent())
    assert len(peers) == n_connections


@ENDPOINTS
def test_refusals_are_told_apart_with_latencies_of_their_own(endpoint: Endpoint) -> None:
    async def script(question: str) -> AnswerResponse:
        n_asked.append(1)
        if len(n_asked) % 2:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, 429)
        await asyncio.sleep(0.2)
        return answered(question)

    async def measured() -> Result:
        async with endpoint(script) as address:
            return await measure(asked(address))

    n_asked: list[int] = []
    result = asyncio.run(measured())
    found = result.measured
    assert counts(found) == {OK: 25, REFUSED: 25}
    assert found.n_refused == 25
    assert found.goodput_rate == found.answered_rate == 50.0
    assert found.latency
    assert found.refusal
    assert found.latency.n == found.refusal.n == 25
    assert found.latency.p50_s >= 0.2
    assert found.refusal.mean_s < found.latency.mean_s
    told = next(each for each in found.statuses if each.status == REFUSED)
    assert told.seen == ({"429": 25} if endpoint is http_endpoint else {REFUSED: 25})
    assert "scripted" in told.example
    assert [each.counts for each in result.seconds] == [{OK: 25, REFUSED: 25}]


def test_an_answer_after_the_deadline_is_no_goodput() -> None:
    async def script(question: str) -> AnswerResponse:
        await asyncio.sleep(0.3)
        return answered(question)

    async def measured() -> Figures:
        async with grpc_endpoint(script) as address:
            return (await measure(asked(address, timeout_s=0.2))).measured

    found = asyncio.run(measured())
    assert found.answered_rate > 50  # a busy machine may leave some hanging
    assert found.goodput_rate == found.good_share == 0.0


@ENDPOINTS
def test_what_never_answers_hangs_and_is_left_on_time(endpoint: Endpoint) -> None:
    async def script(question: str) -> AnswerResponse:
        try:
            await asyncio.Event().wait()
        finally:
            left.append(question)
        return answered(question)

    async def measured() -> Result:
        async with endpoint(script) as address:
            return await measure(asked(address, timeout_s=0.2, rate=20))

    left: list[str] = []
    result = asyncio.run(measured())
    assert counts(result.measured) == {HANG: 10}
    assert result.measured.n_hangs == 10
    assert result.measured.latency is None
    assert result.outcomes.latency_s == pytest.approx(np.full(10, 0.2 + GRACE_S), abs=0.3)
    if endpoint is grpc_endpoint:  # our ASGI application does not listen for callers who leave
        assert len(left) == 10


def test_wrong_replies_are_counted_by_question_and_snapshot() -> None:
    async def script(question: str) -> AnswerResponse:
        n_asked.append(1)
        odd = len(n_asked) == 3
        return answered("odd" if odd else "even", snapshot_id="before" if len(n_asked) < 20 else "after")

    async def measured(**values: Any) -> Result:
        n_asked.clear()
        async with grpc_endpoint(script) as address:
            return await measure(asked(address, zipf=10, **values))  # the first question nearly always

    n_asked: list[int] = []
    result = asyncio.run(measured(check="text"))
    assert result.measured.n_wrong == 1
    with pytest.raises(WrongReplies, match=r"of \d+ answers compared 1 differ"):
        result.check()
    assert asyncio.run(measured()).measured.n_checked == 0


def test_scores_are_compared_only_to_the_bit() -> None:
    async def script(question: str) -> AnswerResponse:
        n_asked.append(1)
        return answered("a", score=1.0 if len(n_asked) % 10 else 1.0 + 2**-50)

    async def measured(check: str) -> int:
        n_asked.clear()
        async with grpc_endpoint(script) as address:
            return (await measure(asked(address, zipf=10, check=check))).measured.n_wrong

    n_asked: list[int] = []
    assert asyncio.run(measured("text")) == 0
    assert asyncio.run(measured("bits")) == 5


# --- errors of the load generator


def test_a_late_sender_is_an_error_that_names_the_numbers() -> None:
    async def measured() -> Result:
        async with grpc_endpoint(echo) as address, asyncio.TaskGroup() as group:

            async def block() -> None:
                await asyncio.sleep(0.3)
                end = monotonic() + 0.4
                while monotonic() < end:  # nothing else of this loop gets on
                    pass

            group.create_task(block())
            return await measure(asked(address, duration_s=1.0))

    result = asyncio.run(measured())
    assert result.measured.on_time < 0.9
    assert result.measured.send_delay
    assert result.measured.send_delay.max_s > 0.2
    with pytest.raises(
        NotKeptUp, match=r"sent/intended must be at least 0.99, got \d\d/100 = 0\.\d+ sent within 50 ms"
    ):
        result.check()


def test_too_many_in_flight_is_loud() -> None:
    async def script(question: str) -> AnswerResponse:
        await asyncio.sleep(0.4)
        return answered(question)

    async def measured() -> Result:
        async with grpc_endpoint(script) as address:
            return await measure(asked(address, max_in_flight=5))

    result = asyncio.run(measured())
    assert counts(result.measured)[NOT_SENT] > 30
    with pytest.raises(NotKeptUp, match=r"; \d+ were not sent: 5 were in flight already"):
        result.check()


@pytest.mark.parametrize("prefix", ["", "http://"])
def test_nobody_at_the_address(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("grpc_sender", "http_sender"):
        monkeypatch.setattr(f"openbook.loadtest.{module}.CONNECT_TIMEOUT_S", 0.2)
    address = f"{prefix}127.0.0.1:{processes.free_port()}"
    with pytest.raises(Unreachable, match=address):
        run(asked(address))


def test_what_speaks_no_http_is_not_measured() -> None:
    """As a port of TLS, or of gRPC, that is asked in the clear."""

    async def measured() -> None:
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as server:
            await measure(asked(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))

    hint = "is that an endpoint's HTTP port"
    with pytest.raises(Unreachable, match=rf"^http://127\.0\.0\.1:\d+: .*[Dd]isconnected; {hint}"):
        asyncio.run(measured())


@pytest.mark.parametrize("what", ["answer", "stream", "retrieve"])
def test_grpc_of_something_else_or_of_another_version_is_not_measured(what: str) -> None:
    """As of an index server, or of a proxy that speaks HTTP/2 on the port of HTTP."""

    async def measured() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            await measure(asked(f"127.0.0.1:{port}", what=what))
        finally:
            await server.stop(0)

    hint = r"is that an endpoint's gRPC port \(HTTP .* in front\), or one of another version, or does a proxy refuse\?"
    with pytest.raises(Unreachable, match=rf"^127\.0\.0\.1:\d+: Method not found!; {hint}$"):
        asyncio.run(measured())


def test_what_is_silent_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.loadtest.http_sender.CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert counts(run(asked(address, rate=10, timeout_s=0.1)).measured) == {HANG: 5}


@pytest.mark.parametrize("redirect", [web.HTTPFound, web.HTTPTemporaryRedirect])  # the latter has the question sent on
def test_a_gateway_that_sends_callers_elsewhere_is_measured_itself(redirect: type[web.HTTPRedirection]) -> None:
    came: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        came.append(request.method)
        return web.json_response({"evidence": []})

    async def gateway(request: web.Request) -> web.Response:
        raise redirect("/login")

    async def measured() -> Result:
        app = web.Application()
        app.add_routes([web.route("*", "/login", elsewhere), web.route("*", "/{any:.*}", gateway)])
        async with TestServer(app) as server:
            return await measure(asked(str(server.make_url("")), rate=10))

    assert counts(asyncio.run(measured()).measured) == {"UNKNOWN": 5}
    assert not came


# --- loops and processes


@ENDPOINTS
def test_several_processes_share_the_schedule(endpoint: Endpoint) -> None:
    async def measured(**values: Any) -> Result:
        async with endpoint(echo) as address:
            settings = asked(address, arrivals="poisson", seed=3, check="text", **values)
            return await measure(settings, lambda *counts: told.append(counts))

    told: list[tuple[int, int, int]] = []
    alone, shared = asyncio.run(measured()), asyncio.run(measured(processes=2))
    assert told[-1] == (shared.measured.n,) * 3  # of all processes
    assert shared.outcomes.intended_s.tolist() == alone.outcomes.intended_s.tolist()
    assert counts(shared.measured) == counts(alone.measured)
    assert shared.measured.n_checked == alone.measured.n_checked


def test_processes_tell_why_they_cannot_begin(tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    with pytest.raises(Unreachable, match=r"missing\.txt"):
        run(asked("127.0.0.1:1", processes=2, questions=missing))


def test_what_a_killed_run_left_behind_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "openbook-loadtest-left").mkdir()
    with pytest.raises(Unreachable):
        run(asked("127.0.0.1:1", processes=2, questions=tmp_path / "missing.txt"))
    assert list(tmp_path.iterdir()) == []


def test_a_closed_loop_asks_again_when_answered() -> None:
    async def script(question: str) -> AnswerResponse:
        in_flight.append(1)
        most.append(len(in_flight))
        await asyncio.sleep(0.02)
        in_flight.pop()
        return answered(question)

    async def measured() -> Result:
        async with grpc_endpoint(script) as address:
            return await measure(asked(address, closed=3))

    async def of_two_processes() -> list[int]:
        found = []
        async with grpc_endpoint(script) as address:
            for number in range(2):
                most.clear()
                settings = asked(address, closed=3, processes=2, duration_s=0.1)
                await part(settings, number, monotonic, lambda *counts: None)
                found.append(max(most))
        return found

    in_flight: list[int] = []
    most: list[int] = []
    assert asyncio.run(of_two_processes()) == [2, 1]
    result = asyncio.run(measured())
    assert max(most) == 3
    assert result.date - result.begun == pytest.approx(time.time() - monotonic(), abs=0.1)  # the same moment
    assert 10 < result.measured.n <= 75 + 3
    assert result.as_json()["loop"] == "closed"
    result.check()


def test_a_thread_measures_while_its_process_does_other_things() -> None:
    async def measured() -> Result:
        async with http_endpoint(echo) as address:
            return await asyncio.to_thread(run, asked(address))

    assert counts(asyncio.run(measured()).measured) == {OK: 50}


def test_faults_are_seen_at_the_second_in_which_they_were_caused() -> None:
    async def script(question: str) -> AnswerResponse:
        if broken.is_set():
            raise Refused(grpc.StatusCode.UNAVAILABLE)
        return answered(question)

    async def measured() -> Result:
        def on_begin(begun: float) -> None:
            loop = asyncio.get_running_loop()
            loop.call_at(begun + 1, broken.set)
            loop.call_at(begun + 2, broken.clear)

        async with grpc_endpoint(script) as address:
            return await measure(asked(address, duration_s=3.0), on_begin=on_begin)

    broken = asyncio.Event()
    seconds = asyncio.run(measured()).seconds
    assert [each.counts.get("UNAVAILABLE", 0) > 50 for each in seconds] == [False, True, False]
    assert [each.counts.get(OK, 0) > 50 for each in seconds] == [True, False, True]


def test_an_endpoint_that_comes_back_is_asked_again_at_once() -> None:
    """gRPC by itself would leave it alone for seconds, and for minutes in the end."""
    port = processes.free_port()

    async def measured() -> Result:
        async def outage() -> None:
            async with grpc_endpoint(echo, port):
                ready.set()
                await answers.wait()
            await lost.wait()
            async with grpc_endpoint(echo, port):
                await over.wait()

        def on_progress(n_begun: int, n_done: int, n_ok: int) -> None:
            if n_ok >= 10:
                answers.set()
            if n_done - n_ok >= 70:  # 3.5 s at 20 a second: gRPC's own next attempt would be a second and more away
                lost.set()

        ready, answers, lost, over = (asyncio.Event() for _ in range(4))
        async with asyncio.TaskGroup() as group:
            group.create_task(outage())
            await ready.wait()
            result = await measure(asked(f"127.0.0.1:{port}", rate=20, duration_s=6.5), on_progress)
            for each in (answers, lost, over):  # whatever was measured, the outage ends
                each.set()
        return result

    result = asyncio.run(measured())
    lost = counts(result.measured)["UNAVAILABLE"]
    assert 70 <= lost < 70 + 20  # those of one second
    assert result.seconds[-1].counts == {OK: 10}  # of half a second


# --- the knee


def test_the_knee_of_a_server_of_known_capacity() -> None:
    """It answers one question at a time, in 20 ms by its own clock: 50 a second, and no more."""

    async def script(question: str) -> AnswerResponse:
        nonlocal free_at
        free_at = max(free_at, monotonic()) + 0.02
        await asyncio.sleep(free_at - monotonic())
        return answered(question)

    async def search() -> knee.Knee:
        def measured(step: LoadSettings) -> Result:
            """Once the load generator, in this process and on the server's loop, keeps up."""
            for _ in range(N_TRIES):
                found = asyncio.run_coroutine_threadsafe(measure(step), loop).result()
                if found.measured.on_time >= MIN_ON_TIME:
                    break
            return found

        loop = asyncio.get_running_loop()
        async with grpc_endpoint(script) as address:
            settings = asked(address, rate=30, timeout_s=0.15, duration_s=1.0)
            return await asyncio.to_thread(knee.find, settings, knee.Limits(precision=0.1), measured)

    for _ in range(N_TRIES):
        free_at = 0.0
        found = asyncio.run(search())
        # In a short step a queue has little time to grow.
        is_known = 40 <= (found.rate or 0) < (found.above or 0) <= 70 and found.ended == "known to 10%"
        if is_known:
            break
    assert is_known, found


# --- the command


LATE = "openbook: the load generator could not keep up"  # a busy machine's


async def command(*arguments: str, script: Any = echo) -> tuple[int, str]:
    """Exit code and what was said, with the endpoint's address in place of ADDRESS."""
    async with grpc_endpoint(script) as address:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-m", "openbook.cli"),
            *(address if each == "ADDRESS" else each for each in arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "80", "GRPC_VERBOSITY": "NONE"},
        )
        said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


async def invoked(*arguments: str, script: Any = echo) -> tuple[int, str]:
    """As `command`, in this process, where all is imported already. Raises errors of ours."""
    async with grpc_endpoint(script) as address:
        words = [address if each == "ADDRESS" else each for each in arguments]
        done = await asyncio.to_thread(CliRunner().invoke, app, words, catch_exceptions=False)
    return done.exit_code, done.output


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages whose pictures nobody looks at: they take longer than all else of a short run."""
    monkeypatch.setattr(pictures, "_svg", lambda *draws: "")


def test_a_run_is_shown_and_kept(tmp_path: Path) -> None:
    options = ("--rate", "50", "--duration", "1", "--warm-up", "1", "--what", "stream", "--check", "text")
    code, said = asyncio.run(command("loadtest", "ADDRESS", *options, "--output", str(tmp_path / "run")))
    assert code == 0 or LATE in said, said
    assert max(len(line) for line in said.splitlines() if LATE not in line) <= 80
    for word in ("p99.9", "first token", "goodput", "sent/intended", "hangs 0", "answered", OK):
        assert word in said
    kept = json.loads((tmp_path / "run" / "result.json").read_text())
    assert kept["settings"]["rate"] == 50
    assert kept["measured"]["latency"]["n"] == kept["measured"]["n"] > 20
    assert kept["command"].startswith("cli.py loadtest 127.0.0.1:")
    assert kept["machine"]["cores"] >= 1
    rows = list(csv.DictReader((tmp_path / "run" / "seconds.csv").read_text().splitlines()))
    assert [row["warm_up"] for row in rows] == ["1", "0"]
    assert int(rows[1][OK]) == int(rows[1]["intended"]) == kept["measured"]["n"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg") == 2
    assert not any(word in page for word in ("<script", "<link", "<img", "@import", " src="))


@pytest.mark.usefixtures("undrawn")
def test_a_file_of_questions_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured() -> Result:
        async with grpc_endpoint(echo) as address:
            return await measure(asked(address, duration_s=0.1, processes=2, questions=questions))

    questions = Path(os.fsdecode(bytes(tmp_path) + b"/q\xff.txt"))
    questions.write_text("who?\n")
    monkeypatch.setattr(sys, "argv", ["openbook", "loadtest", "--questions", str(questions)])
    folder.write(tmp_path / "run", asyncio.run(measured()))
    kept = folder.read(tmp_path / "run")
    assert (kept.settings.questions, kept.measured.n) == (questions, 10)


@pytest.mark.usefixtures("undrawn")
def test_runs_merge_as_if_one_had_seen_all(tmp_path: Path) -> None:
    async def keep() -> None:
        async with grpc_endpoint(echo) as address:
            for seed, each in enumerate(folders):
                folder.write(each, await measure(asked(address, what="stream", seed=seed, arrivals="poisson")))

    folders = [tmp_path / "one", tmp_path / "two"]
    asyncio.run(keep())
    merge = ["loadtest-merge", *map(str, folders), "--output"]
    with suppress(NotKeptUp):  # on a busy machine
        assert CliRunner().invoke(app, [*merge, str(tmp_path / "both")], catch_exceptions=False).exit_code == 0
    parts, both = [folder.read(each) for each in folders], folder.read(tmp_path / "both")
    assert both.settings.rate == 200
    assert both.measured.n == sum(each.measured.n for each in parts)
    assert both.measured.goodput_rate == pytest.approx(sum(each.measured.goodput_rate for each in parts))
    for name in ("answered.hlog", "first-token.hlog"):
        whole = histograms.read_log(tmp_path / "both" / name)
        assert whole.equals(histograms.merged(histograms.read_log(each / name) for each in folders))
        assert whole.get_total_count() == both.measured.n

    with pytest.raises(InvalidConfig, match=rf"^{folders[0]}: is there already: name a new folder$"):
        CliRunner().invoke(app, [*merge, str(folders[0])], catch_exceptions=False)


@pytest.mark.usefixtures("undrawn")
def test_runs_merge_where_the_authority_that_they_trusted_is_not(tmp_path: Path) -> None:
    async def kept(name: str) -> Path:
        async with grpc_endpoint(echo) as address:
            result = await measure(asked(address, duration_s=0.1))
        over_tls = {"address": f"grpcs://{address}", "tls_ca": tmp_path / "there" / "ca.pem"}
        settings = result.settings.model_copy(update=over_tls)
        folder.write(tmp_path / name, dataclasses.replace(result, settings=settings))
        return tmp_path / name

    folders = [asyncio.run(kept(name)) for name in ("one", "two")]
    both = folder.merge(folders)
    assert both.measured.n == 20
    assert both.settings.tls_ca == tmp_path / "there" / "ca.pem"
    folder.write(tmp_path / "both", both)
    assert folder.read(tmp_path / "both").measured.n == 20


@pytest.mark.usefixtures("undrawn")
def test_one_run_does_not_merge_with_itself_and_equal_seeds_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def kept(name: str, seed: int) -> Path:
        async with grpc_endpoint(echo) as address:
            folder.write(tmp_path / name, await measure(asked(address, duration_s=0.1, seed=seed)))
        return tmp_path / name

    one, own, equal = (asyncio.run(kept(*each)) for each in (("one", 1), ("own", 2), ("equal", 1)))
    with pytest.raises(InvalidConfig, match=r"one: is given twice"):
        folder.merge([one, own, tmp_path / "own" / ".." / "one"])
    folder.merge([one, own])
    assert caplog.messages == []
    folder.merge([one, own, equal])
    assert caplog.messages == [f"{equal}: has the seed of another run, 1: each machine needs its own"]


def test_the_command_searches_the_knee(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("knee", "result"):  # however late this machine sends
        monkeypatch.setattr(f"openbook.loadtest.{module}.MIN_ON_TIME", 0.0)

    async def script(question: str) -> AnswerResponse:
        raise Refused(grpc.StatusCode.UNAVAILABLE)

    options = ("--rate", "60", "--duration", "0.5", "--warm-up", "0", "--output", str(tmp_path / "knee"))
    find = ("--find-knee", "--min-goodput", "0.9")
    code, said = asyncio.run(invoked("loadtest", "ADDRESS", *find, *options, script=script))
    assert code == 0, said
    assert "no rate tried held; 30 did not" in " ".join(said.split())
    kept = json.loads((tmp_path / "knee" / "knee.json").read_text())
    assert [(step["rate"], step["missed"]) for step in kept["steps"]] == [
        (60.0, "goodput/offered 0.000 < 0.9"),
        (30.0, "goodput/offered 0.000 < 0.9"),
    ]
    assert (tmp_path / "knee" / "step-02" / "seconds.csv").exists()
    assert (tmp_path / "knee" / "report.html").read_text().count("<svg") == 1


def test_wrong_replies_end_the_command_with_1() -> None:
    async def wrong(question: str) -> AnswerResponse:
        n_asked.append(1)
        return answered(str(len(n_asked)))

    n_asked: list[int] = []
    short = ("loadtest", "ADDRESS", "--rate", "50", "--duration", "0.5", "--warm-up", "0", "--zipf", "9")
    differ = r"of (\d+) answers compared \d+ differ from their like"
    code, said = asyncio.run(command(*short, "--check", "text", script=wrong))
    assert code == 1
    assert re.search(f"openbook: {differ}", said)
    with pytest.raises(WrongReplies, match=f"^{differ}"):
        asyncio.run(invoked(*short, "--check", "text", "--find-knee", "--max-p99", "0.00001", script=wrong))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["nowhere"], InvalidConfig, r"address = 'nowhere': .*must be host:port \(gRPC\) or http://host:port"),
        (["a:0"], InvalidConfig, r"address = 'a:0': .*must be host:port"),
        (["http://a:1/#there"], InvalidConfig, r"address = 'http://a:1/#there': .*must be host:port"),
        (["a:1", "--rate", "0"], InvalidConfig, r"rate = 0.0: Input should be greater than 0"),
        (
            ["a:1", "--rate", "9e5", "--duration", "99"],
            InvalidConfig,
            r"at most 5,000,000 questions, got 900000 a second",
        ),
        (["a:1", "--rate", "0.1", "--duration", "9"], InvalidConfig, r"one question within duration_s, got 0.1 a"),
        (["a:1", "--k", "4294967296"], InvalidConfig, r"k = 4294967296: Input should be less than 4294967296"),
        (["a:1", "--beams", "5000000000"], InvalidConfig, r"n_beams = 5000000000: Input should be less"),
        (["a:1", "--max-new-tokens", "5000000000"], InvalidConfig, r"max_new_tokens = 5000000000: Input should be"),
        (["a:1", "--output", f"{__file__}/run"], InvalidConfig, r"py/run: cannot be made: Not a directory"),
        (["a:1", "--output", "/proc/none/run"], InvalidConfig, r"/proc/none/run: cannot be made: "),
        (["a:1", "--find-knee", "--rate", "0.2"], InvalidRequest, r"nothing was measured: .* 0.2 a second: raise"),
        (["a:1", "--closed", "2", "--rate", "1"], InvalidRequest, r"^--closed 2 has no use for --rate$"),
        (["a:1", "--cv", "2"], InvalidRequest, r"^--arrivals poisson has no use for --cv$"),
        (["a:1", "--replay", "--zipf", "0"], InvalidRequest, r"^--replay has no use for --zipf$"),
        (["a:1", "--what", "retrieve", "--beams", "4"], InvalidRequest, r"^--what retrieve has no use for --n-beams$"),
        (["a:1", "--what", "retrieve", "--decoding", "fast"], InvalidRequest, r" has no use for --decoding$"),
        (["a:1", "--closed", "1", "--processes", "2"], InvalidConfig, r"processes must be at most closed = 1, got 2"),
        (["a:1", "--tls-ca", __file__], InvalidConfig, r"tls_ca needs an address of grpcs:// or https://, got a:1"),
        (["a:1", "--max-p99", "1"], InvalidRequest, r"^a run without --find-knee has no use for --max-p99-s$"),
        (["a:1", "--find-knee", "--closed", "2"], InvalidRequest, r"--closed 2 has none: give one of them"),
        (["a:1", "--find-knee", "--min-goodput", "2"], InvalidRequest, r"--min-goodput must be above 0, at most 1"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, ["loadtest", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("address", ["http://me:hidden@a:1", "http://me:hid/den@a:1", "me:hidden@a:1", "//hidden@a"])
def test_a_password_in_an_address_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(InvalidConfig, match=r"address: .*must name neither user nor password") as refused:
        CliRunner().invoke(app, ["loadtest", address], catch_exceptions=False)
    assert "hid" not in str(refused.value)


# --- the example for locust


def test_the_file_for_locust_asks_an_endpoint() -> None:
    """With a locust that is a few lines where there is none: what the file calls is what locust has."""
    path = Path(__file__).parents[2] / "examples" / "locustfile.py"
    assert "CLOSED loop" in path.read_text(encoding="utf-8")

    class Response:
        status_code, text = 429, "no place"
        failed: ClassVar[list[str]] = []

        def __enter__(self) -> "Response":
            return self

        def __exit__(self, *error: object) -> None: ...

        def failure(self, why: str) -> None:
            self.failed.append(why)

    class HttpUser:
        def __init__(self) -> None:
            self.client = SimpleNamespace(post=lambda path, **asked: sent.append((path, asked)) or Response())

    sent: list[tuple[str, dict[str, Any]]] = []
    locust = SimpleNamespace(HttpUser=HttpUser, between=lambda low, high: None, task=lambda of: of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "locust", locust)
        names = runpy.run_path(str(path))
    names["Reader"]().ask()
    assert sent == [
        (
            "/v1/answer",
            {"json": {"question": names["QUESTIONS"][0], "timeout_s": 10.0}, "timeout": 11.0, "catch_response": True},
        )
    ]
    assert Response.failed == ["429: no place"]
