"""A client's long-lived stream to one index server: many calls under way, told apart by their numbers."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from itertools import count
from typing import Self, cast

import numpy as np
from grpc import aio

from openbook import wire
from openbook.core.types import Float32
from openbook.errors import OpenbookError, Overloaded, ShardUnavailable
from openbook.index.connection import HEADER, connect_here, frame, tune
from openbook.v1 import index_pb2

LARGE_BYTES = 1 << 16
"""What is larger is sent by itself: to send it with the rest, asyncio would copy it."""


class Stream(ABC):
    """What gRPC's and the other have in common. To be used within one event loop."""

    def __init__(self, address: str) -> None:
        self.broken = False
        self.was_closed = False
        """By us, and not by the server or on the way."""
        self._address = address
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[index_pb2.Reply]] = {}

    async def ask(self, call: index_pb2.Call, queries: Float32 | None = None) -> index_pb2.Reply:
        """The reply to a call, whose queries' numbers come beside it.

        Raises:
            ShardUnavailable: the stream ends.
            Overloaded: it has no place at the server.
        """
        number = call.number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(call, queries)
        try:
            reply: index_pb2.Reply = await future
            return reply
        except asyncio.CancelledError:
            self._send(index_pb2.Call(number=number, cancel=True), None)
            raise
        finally:
            self._waiting.pop(number, None)

    async def drained(self) -> None:
        """Returns when nothing is under way any more."""
        while self._waiting:
            await asyncio.wait(self._waiting.values())
            await asyncio.sleep(0)  # those who waited take their leave

    async def close(self) -> None:
        """End it; whoever waits hears ShardUnavailable."""
        self.was_closed |= not self.broken
        self._break("the connection was closed")
        await self._end()

    @abstractmethod
    async def _end(self) -> None: ...

    @abstractmethod
    def _send(self, call: index_pb2.Call, queries: Float32 | None) -> None: ...

    def _replied(self, reply: index_pb2.Reply) -> None:
        future = self._waiting.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    def _break(self, why: str, code: str = ShardUnavailable.grpc_code) -> None:
        """Everyone who waits hears why, if it is not broken yet."""
        self.broken = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_error(code, f"{self._address}: {why}"))


class GrpcStream(Stream):
    """On an Exchange of gRPC's."""

    def __init__(self, address: str, exchange: aio.StreamStreamCall[index_pb2.Call, index_pb2.Reply]) -> None:
        super().__init__(address)
        self._exchange = exchange
        self._unsent: deque[index_pb2.Call] = deque()
        self._more = asyncio.Event()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    async def _end(self) -> None:
        self._exchange.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, call: index_pb2.Call, queries: Float32 | None) -> None:
        if queries is not None:
            call.search.queries.CopyFrom(wire.matrix_to_wire(queries))
        self._unsent.append(call)
        self._more.set()

    async def _write(self) -> None:
        """In a task of its own: cancelling a write of gRPC's would end the stream for all."""
        sent = 0  # the highest number that went out
        try:
            while not self.broken:
                self._more.clear()
                while self._unsent:
                    call = self._unsent.popleft()
                    if call.cancel if call.number <= sent else call.number in self._waiting:
                        sent = max(sent, call.number)
                        await self._exchange.write(call)
                await self._more.wait()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader knows why

    async def _read(self) -> None:
        why, code = "the server ended the stream", ShardUnavailable.grpc_code
        try:
            async for reply in self._exchange:
                self._replied(reply)
        except aio.AioRpcError as error:
            code = error.code().name
            why = f"{code}: {error.details()}"
        finally:
            self._break(why, code)
            self._more.set()


class FrameStream(Stream, asyncio.Protocol):
    """On a connection without gRPC: see `connection`."""

    def __init__(self, address: str, key: bytes) -> None:
        super().__init__(address)
        self._key = key
        self._received = bytearray()
        self._n_received = 0  # bytes, in all
        self._unsent: list[bytes | memoryview] = []
        self._transport: asyncio.Transport | None = None
        self._greeted = self._waiting[0] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, address: str, frames: index_pb2.Frames, timeout_s: float) -> Self:
        """Connect, and be greeted.

        Raises:
            ShardUnavailable: nobody greets there in time.
        """
        stream = cls(address, frames.key)
        host = address.rpartition(":")[0].strip("[]")
        try:
            async with asyncio.timeout(timeout_s):
                here, loop = connect_here(frames.name), asyncio.get_running_loop()
                if here is not None:
                    await loop.create_unix_connection(lambda: stream, sock=here)
                else:
                    await loop.create_connection(lambda: stream, host, frames.port)
                await stream._greeted
        except BaseException as error:
            stream._greeted.cancel()  # or asyncio would log that nobody asked why it failed
            await stream.close()
            if not isinstance(error, OSError):  # TimeoutError is one
                raise
            raise ShardUnavailable(f"{host}:{frames.port}: cannot be reached: {error or 'nobody answers'}") from None
        del stream._waiting[0]
        return stream

    async def check(self, patience_s: float) -> None:
        """Break if nothing comes for so long, not even the answer to a call that asks for nothing."""
        before = self._n_received
        with suppress(TimeoutError, OpenbookError):
            async with asyncio.timeout(patience_s):
                await self.ask(index_pb2.Call(fetch=index_pb2.FetchRequest()))
        if self._n_received == before:
            self._break(f"nothing came for {patience_s:g} s")
            await self._end()

    async def _end(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _send(self, call: index_pb2.Call, queries: Float32 | None) -> None:
        payload: memoryview | bytes = b""
        if queries is not None:
            matrix = call.search.queries
            matrix.rows, matrix.columns = queries.shape
            payload = np.ascontiguousarray(queries, wire.FLOAT32).reshape(-1).view(np.uint8).data
        self._unsent += frame(call.SerializeToString(), payload)
        if len(self._waiting) == 1:
            self._flush()
        elif len(self._unsent) == 2:  # others may be about to ask too: together they cost one call of the system
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        transport, small = self._transport, []
        if transport is None or self.broken:
            return
        for each in unsent:
            if len(each) < LARGE_BYTES:
                small.append(each)
            elif not transport.is_closing():  # as it is once a write has failed
                transport.writelines(small)
                transport.write(each)
                small = []
        if small and not transport.is_closing():
            transport.writelines(small)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has all of it, and is none
        with suppress(OSError):  # it is gone again, which `connection_lost` is told next
            tune(transport.get_extra_info("socket"))
        self._transport.write(self._key)

    def data_received(self, data: bytes) -> None:
        self._n_received += len(data)
        received, at = self._received, 0
        if not received and len(data) > HEADER.size and HEADER.size + sum(HEADER.unpack_from(data)) == len(data):
            self._take(data[HEADER.size :])  # as a rule
            return
        received += data
        while len(received) >= (start := at + HEADER.size):
            end = start + sum(HEADER.unpack_from(received, at))
            if len(received) < end:
                break
            self._take(bytes(received[start:end]))
            at = end
        del received[:at]

    def _take(self, message: bytes) -> None:
        reply = index_pb2.Reply.FromString(message)
        if reply.number == 0 and reply.HasField("failure"):
            self._break(f"{reply.failure.code}: {reply.failure.message}", reply.failure.code)
        self._replied(reply)

    def connection_lost(self, exc: Exception | None) -> None:  # the name is asyncio's
        self._break(f"the connection broke: {exc}" if exc else "the server ended the stream")


def _error(code: str, message: str) -> OpenbookError:
    """Of those who wait on a stream that ended."""
    return (Overloaded if code == Overloaded.grpc_code else ShardUnavailable)(message)
