"""An ingress replica that is frozen, one that is to stop, and slow callers of one: behind HAProxy as Serve configures
it and we mend it."""

import asyncio
import http.client
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from time import monotonic

import grpc
import httpx
import psutil
import pytest
from behind import Behind, behind_haproxy
from proxies import PATIENCE_S, until

from openbook.processes import end
from openbook.serving.launch.silent import CONNECT_S

LATEST_S = 8.0
"""Promised are 3.3 s, on a machine with nothing else to do."""
N = 6
LONG = b"x" * 100_000
"""More than HAProxy keeps: it cannot be asked again."""


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    with behind_haproxy(tmp_path) as found:
        yield found


class Callers:
    """Over both protocols. What they hear is who answered, or the code of an error."""

    def __init__(self, behind: Behind) -> None:
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{behind.http}", timeout=PATIENCE_S)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{behind.grpc}")
        self._n_begun = 0
        self.all_begun = asyncio.Event()

    async def ask(self, question: bytes = b"who", n: int = N) -> set[str]:
        """So often over each, all at once."""
        ways = (self._ask_over_http, self._ask_over_grpc)
        return set(await asyncio.gather(*(way(question) for way in ways for _ in range(n))))

    async def _ask_over_http(self, question: bytes) -> str:
        try:
            reply = await self._http.post("/Ingress/Ask", content=question)
        except httpx.RemoteProtocolError:
            return "UNAVAILABLE"  # so HAProxy ends what is not the first request of its connection
        return reply.text if reply.status_code == 200 else str(reply.json()["code"])

    async def _ask_over_grpc(self, question: bytes) -> str:
        try:
            answer: bytes = await self._channel.unary_unary("/Ingress/Ask")(question, timeout=PATIENCE_S)
            return answer.decode()
        except grpc.aio.AioRpcError as error:
            return error.code().name

    async def follow(self) -> list[str]:
        """A stream from each ingress over each protocol: all that came of them."""
        ways = (self._follow_over_http, self._follow_over_grpc)
        return await asyncio.gather(*(self._heard(way()) for way in ways for _ in range(2)))

    async def _heard(self, stream: AsyncIterator[str]) -> str:
        parts = []
        with suppress(httpx.RemoteProtocolError, grpc.aio.AioRpcError):
            async for part in stream:
                parts.append(part)
                self._n_begun += 1
                if self._n_begun == 4:
                    self.all_begun.set()
        return " ".join(parts)

    async def _follow_over_http(self) -> AsyncIterator[str]:
        async with self._http.stream("POST", "/Ingress/Follow") as reply:
            async for part in reply.aiter_text():
                yield part

    async def _follow_over_grpc(self) -> AsyncIterator[str]:
        async for part in self._channel.unary_stream("/Ingress/Follow")(b"", timeout=PATIENCE_S):
            yield part.decode()

    async def close(self) -> None:
        await self._http.aclose()
        await self._channel.close()


@asynccontextmanager
async def callers(behind: Behind) -> AsyncIterator[tuple[Callers, asyncio.Task[set[str]], asyncio.Task[list[str]]]]:
    """Callers, whom each ingress owes an answer, and the rest of a stream, over each protocol."""
    found = Callers(behind)
    tasks: tuple[asyncio.Task[set[str]], asyncio.Task[list[str]]] | tuple[()] = ()
    try:
        streams = asyncio.create_task(found.follow())
        await asyncio.wait_for(found.all_begun.wait(), PATIENCE_S)
        tasks = asyncio.create_task(found.ask(b"slow", 2)), streams
        yield found, *tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await found.close()


def test_what_a_frozen_ingress_holds_is_asked_of_the_other(behind: Behind) -> None:
    asyncio.run(freeze(behind))


async def freeze(behind: Behind) -> None:
    frozen, other = behind.ingresses
    async with callers(behind) as (them, answers, streams):
        frozen.send_signal(signal.SIGSTOP)
        began = monotonic()
        assert await them.ask() == {str(other.pid)}
        assert await them.ask(LONG, 1) <= {str(other.pid), "UNAVAILABLE"}
        assert await asyncio.to_thread(behind.until, "DOWN", 0) == {"L7TOUT"}
        assert monotonic() - began < LATEST_S
        behind.go_on(other)
        assert await answers == {str(other.pid)}
        assert sorted(await streams) == sorted(2 * [str(frozen.pid), f"{other.pid} {other.pid}"])  # cut off, and whole
        other.send_signal(signal.SIGSTOP)
        held = asyncio.create_task(them.ask())
        await asyncio.to_thread(behind.until_silent, 1)
        late = asyncio.create_task(them.ask())  # of which nobody hears that there is no replica
        behind.tell_all(signal.SIGCONT)
        await asyncio.to_thread(behind.until, "UP", 0, 1)
        assert await held == {str(other.pid)}  # for nobody else could have answered sooner
        assert await late <= {str(frozen.pid), str(other.pid)}
        assert await them.ask() == {str(frozen.pid), str(other.pid)}
        for each in behind.ingresses:
            each.send_signal(signal.SIGSTOP)
        assert await them.ask() == {"UNAVAILABLE"}  # after ten seconds more


def test_what_an_ingress_holds_whose_machine_is_lost_is_asked_of_the_other(behind: Behind) -> None:
    asyncio.run(lose(behind))


async def lose(behind: Behind) -> None:
    lost, other = behind.ingresses
    with ExitStack() as stack:
        async with callers(behind) as (them, answers, _):
            await asyncio.to_thread(until, lambda: behind.n_open("http", "0") == behind.n_open("grpc", "0") == 2)
            lost.send_signal(signal.SIGSTOP)
            behind.take_places(0, stack)
            behind.go_on(other)
            assert await answers == {str(other.pid)}
            assert behind.down_s(0) < CONNECT_S + 3  # until nobody can still wait for a connection, and a little more
            assert "L4TOUT" in await asyncio.to_thread(behind.until, "DOWN", 0)
            assert await them.ask() == {str(other.pid)}


def test_ingresses_that_can_open_nothing_answer_over_the_connections_that_they_have(behind: Behind) -> None:
    asyncio.run(exhaust(behind))


async def exhaust(behind: Behind) -> None:
    them, pids = Callers(behind), [process.pid for process in behind.ingresses]
    await them.ask()
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, 2 * (psutil.Process(pid).num_fds(),))
    lost = asyncio.gather(*(asyncio.to_thread(behind.until_silent, number) for number in range(2)))
    while not lost.done():
        assert await them.ask(n=1) <= {str(pid) for pid in pids}
    await lost
    await them.close()


def test_an_ingress_that_is_to_stop_ends_what_it_has_begun(behind: Behind) -> None:
    asyncio.run(stop(behind))


async def stop(behind: Behind) -> None:
    stopping, other = behind.ingresses
    async with callers(behind) as (them, answers, streams):
        stopping.send_signal(signal.SIGUSR1)
        assert await asyncio.to_thread(behind.until, "DOWN", 0) == {"L7STS", "L7RSP"}  # it is not silent
        assert await them.ask() == {str(other.pid)}
        behind.go_on(stopping, other)
        both = {str(stopping.pid), str(other.pid)}
        assert await answers == both
        assert set(await streams) == {f"{pid} {pid}" for pid in both}


def test_ingresses_that_are_all_to_stop_are_asked_until_haproxy_knows_another(behind: Behind) -> None:
    asyncio.run(stop_all(behind))


async def stop_all(behind: Behind) -> None:
    them, pids = Callers(behind), {str(process.pid) for process in behind.ingresses}
    behind.tell_all(signal.SIGUSR1)
    refused = asyncio.gather(*(asyncio.to_thread(behind.until_silent, number) for number in range(2)))
    while not refused.done():
        assert await them.ask(n=1) <= pids
    await refused
    await them.close()


def test_who_has_kept_a_connection_to_a_former_process_is_answered_by_a_replica_of_the_next(behind: Behind) -> None:
    gone, other = behind.ingresses
    kept = http.client.HTTPConnection("127.0.0.1", behind.http, timeout=PATIENCE_S)

    def ask() -> tuple[str, str | None, bytes]:
        kept.request("POST", "/Ingress/Ask", b"who")
        reply = kept.getresponse()
        over_grpc = channel.unary_unary("/Ingress/Ask")(b"who", timeout=PATIENCE_S)
        return reply.read().decode(), reply.getheader("connection"), over_grpc

    channel = grpc.insecure_channel(f"127.0.0.1:{behind.grpc}")
    with channel, closing(kept), behind.succeeded_by_one_that_knows(0):
        assert ask() == (str(gone.pid), None, str(gone.pid).encode())
        with behind.succeeded_by_one_that_knows(1):
            end(gone)
            # Over HTTP he is told to connect anew; over gRPC he was at once.
            assert ask() == (str(other.pid), "close", str(other.pid).encode())


def test_haproxy_gives_back_the_memory_that_an_attack_took(behind: Behind) -> None:
    process = psutil.Process(behind.pid)
    before = process.memory_info().rss
    with ExitStack() as stack:
        for _ in range(500):
            sender = stack.enter_context(socket.create_connection(("127.0.0.1", behind.http)))
            sender.sendall(b"POST /Ingress/Ask HTTP/1.1\r\nHost: x\r\nContent-Length: 20000\r\n\r\n" + bytes(12_000))
        until(lambda: process.memory_info().rss > 1.4 * before)
    until(lambda: process.memory_info().rss < 1.1 * before)


def test_a_replica_does_not_meet_a_call_over_grpc_before_its_message(behind: Behind) -> None:
    asyncio.run(never_end(behind))


async def never_end(behind: Behind) -> None:
    them, never = Callers(behind), asyncio.Event()

    async def nothing() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async def call(channel: grpc.aio.Channel) -> str:
        try:
            async for _ in channel.stream_stream("/Ingress/Ask")(nothing(), timeout=PATIENCE_S):
                pass
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"

    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{behind.grpc}", [("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        calls = [asyncio.create_task(call(channel)) for _ in range(50)]
        assert await them.ask() == {str(process.pid) for process in behind.ingresses}
        await asyncio.to_thread(until, lambda: behind.n_open("grpc_frontend", "FRONTEND") == 2)
        n_met = behind.n_open("grpc", "BACKEND")
        heard = await asyncio.gather(*calls)
    await them.close()
    assert (n_met, set(heard)) == (0, {"DEADLINE_EXCEEDED: a call must arrive within 10 s, 1 s while many others do"})
