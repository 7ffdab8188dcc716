"""What an index server knows of itself, read whenever somebody asks for metrics: nothing is counted for it."""

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from openbook.index.server.coalesce import Coalescer
from openbook.index.server.held import HeldSnapshots
from openbook.index.server.streams import OpenStreams
from openbook.index.shard.shard import Shard


class ServerMetrics(Collector):
    """Of the one server of this process: among its metrics while it is entered."""

    def __init__(self, held: HeldSnapshots[Shard], searches: Coalescer, streams: OpenStreams) -> None:
        self._held = held
        self._searches = searches
        self._streams = streams

    def collect(self) -> Iterator[GaugeMetricFamily]:
        shard = self._held.current
        for name, what, value in (
            ("rows_waiting", "Query rows that wait to be searched for", self._searches.n_rows),
            ("streams", "Connections of clients", len(self._streams)),
            ("passages", "In the shard of the current snapshot", shard.n_passages),
            ("shard", "Which shard of the snapshot it serves", shard.number),
        ):
            yield GaugeMetricFamily(f"openbook_index_{name}", what, value)
        snapshots = GaugeMetricFamily(
            "openbook_index_snapshots",
            "Snapshots held, by the sequence of their publication; 0 before it",
            labels=["snapshot", "state"],
        )
        for snapshot_id, state, sequence in self._held.states():
            snapshots.add_metric([snapshot_id, state], sequence)
        yield snapshots

    def __enter__(self) -> Self:
        REGISTRY.register(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        REGISTRY.unregister(self)
