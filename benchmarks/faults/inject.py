"""What hurts: signals to processes, a network between two of them that is slow, cut or out of its mind."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum

import psutil

from openbook.processes import free_port

SLICE_S = 0.05
"""How long a slow process runs, and then stands still, in turn."""
SLOW_S = 0.2
"""What a slow network adds to a reply."""


def kill(*pids: int) -> None:
    """End processes, and wait for the end."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while any(map(_lives, pids)):
        time.sleep(0.01)


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Processes that stand still for as long as the body runs."""
    _send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(pids, signal.SIGCONT)


@contextmanager
def slowed(*pids: int, stands_s: float = SLICE_S, runs_s: float = SLICE_S) -> Iterator[None]:
    """Processes that stand still half of the time, or as long as it is said."""
    over = threading.Event()

    def alternate() -> None:
        while not over.is_set():
            with frozen(*pids):
                over.wait(stands_s)
            over.wait(runs_s)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def limited(resource: int, limits: dict[int, int]) -> Iterator[None]:
    """Processes, by id, that get no more of a resource than this; see `resource.setrlimit`."""
    former = {pid: psutil.Process(pid).rlimit(resource) for pid in limits}
    for pid, limit in limits.items():
        psutil.Process(pid).rlimit(resource, (limit, former[pid][1]))
    try:
        yield
    finally:
        for pid, limits_before in former.items():
            with suppress(psutil.Error):
                psutil.Process(pid).rlimit(resource, limits_before)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Mode(Enum):
    """What a network does with bytes."""

    PASS = "passes them on"
    SLOW = "keeps each reply for a while"
    CUT = "keeps them until it passes again, as TCP does for a cut wire"
    NONSENSE = "answers by itself, at random"


class TcpProxy:
    """A port of loopback that stands for another one, in a thread of its own."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self.mode = Mode.PASS
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "TcpProxy":
        self._thread.start()
        serving = asyncio.start_server(self._serve, "127.0.0.1", self.port)
        asyncio.run_coroutine_threadsafe(serving, self._loop).result(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @contextmanager
    def does(self, mode: Mode) -> Iterator[None]:
        """Another mode for as long as the body runs."""
        self.mode = mode
        try:
            yield
        finally:
            self.mode = Mode.PASS

    async def _serve(self, asked: asyncio.StreamReader, replies: asyncio.StreamWriter) -> None:
        forward: asyncio.StreamWriter | None = None
        try:
            backward, forward = await asyncio.open_connection("127.0.0.1", self.target)
            await asyncio.gather(self._asks(asked, forward, replies), self._answers(backward, replies))
        except OSError:
            pass
        finally:
            for writer in filter(None, (forward, replies)):
                writer.close()

    async def _asks(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, back: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if self.mode is Mode.NONSENSE:
                back.write(os.urandom(64) + b"\r\n")
            else:
                await self._pass(data, sink)
        sink.close()

    async def _answers(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if self.mode is Mode.SLOW:
                await asyncio.sleep(SLOW_S)
            if self.mode is not Mode.NONSENSE:
                await self._pass(data, sink)
        sink.close()

    async def _pass(self, data: bytes, sink: asyncio.StreamWriter) -> None:
        while self.mode is Mode.CUT:  # noqa: ASYNC110  # which another thread sets
            await asyncio.sleep(0.01)
        sink.write(data)
        await sink.drain()
