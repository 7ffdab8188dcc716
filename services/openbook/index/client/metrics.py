"""The index tier as one process sees it, read whenever somebody asks for metrics."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from openbook.index.client.sharded import ShardedIndex


class TierMetrics(Collector):
    """Of one index tier: register it where its metrics belong."""

    def __init__(self, index: ShardedIndex) -> None:
        self._index = index

    def collect(self) -> Iterator[GaugeMetricFamily]:
        servers = GaugeMetricFamily(
            "openbook_shard_servers", "Index servers, by shard and whether they answer", labels=["shard", "state"]
        )
        counted = Counter(self._index.servers())
        # Each shard: of one whose servers have all left the list nothing else would be said.
        for shard in sorted({*map(str, range(self._index.n_shards)), *(shard for shard, _ in counted)}):
            servers.add_metric([shard, "answers"], counted[shard, True])
            servers.add_metric([shard, "gone"], counted[shard, False])
        yield servers
        yield GaugeMetricFamily(
            "openbook_searched_sequence", "Of the publication of the snapshot that is searched", self._index.sequence
        )
