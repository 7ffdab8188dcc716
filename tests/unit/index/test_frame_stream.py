import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from openbook.errors import OpenbookError
from openbook.index.client.stream import LARGE_BYTES, FrameStream
from openbook.index.connection import HEADER, frame
from openbook.v1 import index_pb2


def framed(reply: index_pb2.Reply) -> bytes:
    return b"".join(frame(reply.SerializeToString()))


@given(sizes=st.lists(st.integers(0, 40), max_size=6), cuts=st.lists(st.integers(0, 400)))
def test_replies_arrive_whole_however_their_bytes_come(sizes: list[int], cuts: list[int]) -> None:
    async def main() -> None:
        stream = FrameStream("index:7000", b"")
        stream._greeted.cancel()
        replies = [index_pb2.Reply(number=1 + i) for i in range(len(sizes))]
        for reply, size in zip(replies, sizes, strict=True):
            reply.search.bm25 = bytes(size)
            stream._waiting[reply.number] = asyncio.get_running_loop().create_future()
        sent = b"".join(map(framed, replies))
        ends = sorted({min(cut, len(sent)) for cut in cuts} | {len(sent)})
        for start, end in zip([0, *ends], ends, strict=False):
            stream.data_received(sent[start:end])
        del stream._waiting[0]
        assert [stream._waiting[reply.number].result() for reply in replies] == replies
        assert not stream._received

    asyncio.run(main())


def test_a_failure_of_no_call_ends_the_connection_for_all() -> None:
    async def main() -> None:
        stream = FrameStream("index:7000", b"")
        told = index_pb2.Reply(failure=index_pb2.Failure(code="UNAVAILABLE", message="this server is stopping"))
        asked = stream._waiting[1] = asyncio.get_running_loop().create_future()
        stream.data_received(framed(told) + framed(index_pb2.Reply(number=1)))
        assert stream.broken
        for each in (asked, stream._greeted):
            assert isinstance(each.exception(), OpenbookError)

    asyncio.run(main())


class Transport(asyncio.Transport):
    """Takes everything, and notes how it came."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))


def test_large_queries_are_sent_by_themselves_and_in_their_order() -> None:
    async def main() -> None:
        stream, transport = FrameStream("index:7000", b""), Transport()
        stream._greeted.cancel()
        del stream._waiting[0]
        stream._transport = transport
        large = np.ones((LARGE_BYTES // 4, 1), np.float32)
        asking = [
            asyncio.create_task(stream.ask(index_pb2.Call(), queries)) for queries in (large, large[:1], large, None)
        ]
        for _ in range(2):  # all ask, and what they left is sent
            await asyncio.sleep(0)
        sent = b"".join(transport.written)
        at, sizes = 0, []
        while at < len(sent):
            n_message, n_payload = HEADER.unpack_from(sent, at)
            call = index_pb2.Call.FromString(sent[at + HEADER.size : (at := at + HEADER.size + n_message)])
            sizes.append((call.number, n_payload))
            at += n_payload
        assert sizes == [(1, large.nbytes), (2, 4), (3, large.nbytes), (4, 0)]
        assert transport.written.count(large.tobytes()) == 2  # copied into nothing else
        for each in asking:
            each.cancel()

    asyncio.run(main())
