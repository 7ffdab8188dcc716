"""An ingress replica that is frozen, and one that is to stop, behind the HAProxy that Serve configures and we mend."""

import asyncio
import csv
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import grpc
import httpx
import pytest
from ray.serve._private import haproxy
from ray.serve._private.common import RequestProtocol
from ray.serve.config import HTTPOptions, gRPCOptions

from openbook.processes import end, free_port, free_ports, start
from openbook.serving.launch import tls

LATEST_S = 8.0
"""Promised are 3.3 s, on a machine with nothing else to do."""
PATIENCE_S = 30.0
N = 6
LONG = b"x" * 100_000
"""More than HAProxy keeps: it cannot be asked again."""


@dataclass
class Behind:
    """HAProxy, and what stands behind it."""

    folder: Path
    http: int
    grpc: int
    ingresses: "list[subprocess.Popen[str]]"

    def until(self, status: str, *ingresses: int) -> set[str]:
        """What came of the last check, once HAProxy has all of these in this state."""
        give_up = monotonic() + PATIENCE_S
        names = [(protocol, str(number)) for protocol in ("http", "grpc") for number in ingresses]
        while True:
            rows = csv.DictReader(tls.tell(self.folder / "admin.sock", "show stat\n").splitlines())
            found = {(row["# pxname"], row["svname"]): row for row in rows}
            if {found[name]["status"] for name in names} == {status}:
                return {found[name]["check_status"].removeprefix("* ") for name in names}
            assert monotonic() < give_up, found
            sleep(0.02)

    def tell_all(self, number: int) -> None:
        for process in self.ingresses:
            process.send_signal(number)

    def go_on(self, *ingresses: "subprocess.Popen[str]") -> None:
        """They answer what they owe."""
        for process in ingresses:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    """Two small ingresses."""
    script = Path(__file__).parent / "small_ingress.py"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as stack:
        ingresses = [start([sys.executable, str(script)], text=True, **pipes) for _ in range(2)]
        for process in ingresses:
            stack.callback(end, process)
        found = Behind(tmp_path, free_port(), free_port(), ingresses)
        ports = [process.stdout.readline().split() for process in ingresses if process.stdout]
        assert len(ports) == 2
        configure(found, [[int(each) for each in pair] for pair in ports])
        command = [sys.executable, "-m", "openbook.serving.launch.haproxy", "-db", "-f", str(tmp_path / "haproxy.cfg")]
        stack.callback(found.tell_all, signal.SIGCONT)
        with (tmp_path / "log").open("w") as log:
            stack.callback(end, start(command, env={**os.environ}, stdout=log, stderr=log))
        give_up = monotonic() + PATIENCE_S
        while not (tmp_path / "admin.sock").exists():
            assert monotonic() < give_up, (tmp_path / "log").read_text()
            sleep(0.02)
        found.until("UP", 0, 1)
        yield found


def configure(behind: Behind, ports: list[list[int]]) -> None:
    """As Serve's manager of HAProxy writes it."""
    spare = free_ports(3)
    files = {name: str(behind.folder / name) for name in ("server_state_base", "server_state_file")}
    config = haproxy.HAProxyConfig(
        socket_path=str(behind.folder / "admin.sock"),
        metrics_socket_path=str(behind.folder / "metrics.sock"),
        **files,
        nbthread=1,
        timeout_client_s=60,
        stats_port=spare,
        metrics_port=spare + 1,
        http_options=HTTPOptions(host="127.0.0.1", port=behind.http),
        grpc_options=gRPCOptions(port=behind.grpc, grpc_servicer_functions=["any"]),
    )
    backends = {
        name: haproxy.BackendConfig(
            name=name,
            path_prefix="/",
            app_name="openbook",
            protocol=protocol,
            servers=[haproxy.ServerConfig(str(number), "127.0.0.1", pair[i]) for number, pair in enumerate(ports)],
            fallback_server=haproxy.ServerConfig("fallback", "127.0.0.1", spare + 2),
        )
        for i, (name, protocol) in enumerate((("http", RequestProtocol.HTTP), ("grpc", RequestProtocol.GRPC)))
    }
    api = haproxy.HAProxyApi(config, backends, config_file_path=str(behind.folder / "haproxy.cfg"))
    api._generate_config_file_internal()


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
        await asyncio.to_thread(behind.until, "DOWN", 0, 1)
        assert await them.ask() == {"UNAVAILABLE"}
        behind.tell_all(signal.SIGCONT)
        await asyncio.to_thread(behind.until, "UP", 0, 1)
        assert await held == {str(other.pid)}  # for nobody else could have answered sooner
        assert await them.ask() == {str(frozen.pid), str(other.pid)}


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
