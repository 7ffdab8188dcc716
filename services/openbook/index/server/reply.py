"""What is sent in reply to a call: a message, or the parts of one."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from openbook import wire
from openbook.core.types import Float32
from openbook.v1 import index_pb2


@dataclass(slots=True)
class Fetched:
    """What a fetch found, as it will be sent: copies of megabytes would let nobody else get on."""

    parts: list[bytes] = field(default_factory=list)  # of a serialized FetchResponse
    vectors: Float32 | None = None  # (n, d)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.parts)) + (0 if self.vectors is None else self.vectors.nbytes)

    def fill(self, response: index_pb2.FetchResponse) -> None:
        """Put it into an empty response."""
        response.MergeFromString(b"".join(self.parts))
        if self.vectors is not None:
            wire.fill_matrix(response.vectors, self.vectors)


@dataclass(slots=True)
class Reply:
    """A reply, and what belongs into it."""

    message: index_pb2.Reply
    fetched: Fetched | None = None

    def whole(self) -> index_pb2.Reply:
        """As one message."""
        if self.fetched:
            self.fetched.fill(self.message.fetch)
        return self.message

    def parts(self) -> Iterator[bytes | memoryview]:
        """The same, serialized."""
        yield self.message.SerializeToString()
        if not self.fetched:
            return
        for part in self.fetched.parts:
            yield wire.begun(index_pb2.Reply, "fetch", len(part)) + part
        if (vectors := self.fetched.vectors) is not None:
            head = wire.before_vectors(vectors)
            yield wire.begun(index_pb2.Reply, "fetch", len(head) + vectors.nbytes) + head
            if vectors.size:
                yield vectors.data.cast("B")
