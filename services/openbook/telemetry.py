"""What each process measures, under which names, and where it can be read; request ids."""

import errno
import logging
import uuid
from functools import cache
from types import TracebackType
from typing import Self

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from openbook.core.address import address_of
from openbook.errors import PortInUse, StartupError

log = logging.getLogger(__name__)

# The endpoint.
# Cached, here and below: `labels` would look them up under a lock every time.
requests = cache(Counter("openbook_requests", "Requests by method and outcome", ["method", "code"]).labels)
REQUEST_SECONDS = Histogram(
    "openbook_request_seconds",
    "From being asked until it was answered, or the stream ended",
    ["method"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
IN_FLIGHT = Gauge("openbook_in_flight", "Questions admitted and not yet answered")
WORK_IN_FLIGHT = Gauge("openbook_work_in_flight", "Their predicted work, as answer.max_work counts")
WORK_PER_SECOND = Gauge("openbook_work_per_second", "Work answered in a second; 0 before it is known")
refused = cache(Counter("openbook_refused", "Work refused, by whom and for want of what", ["by", "want"]).labels)
STAGE_SECONDS = Histogram("openbook_stage_seconds", "Duration of one stage of one question", ["stage"])
stage_errors = cache(Counter("openbook_stage_errors", "Questions that ended in this stage", ["stage", "code"]).labels)

# The models.
BATCH_SIZE = Histogram(
    "openbook_batch_size",
    "Questions computed at once",
    ["model"],
    buckets=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64),
)
BATCH_SECONDS = Histogram("openbook_batch_seconds", "Duration of one batch", ["model"])
QUEUED = Gauge("openbook_queued", "Questions waiting for a model", ["model"])
QUEUE_SECONDS = Histogram("openbook_queue_seconds", "From coming into a model's queue to computing", ["model"])
hop_errors = cache(Counter("openbook_hop_errors", "Calls to replicas that failed on the way", ["to", "error"]).labels)

# The cache.
CACHE_LOOKUPS = Counter("openbook_cache_lookups", "Query embeddings and answers looked up", ["tier", "outcome"])
CACHE_ERRORS = Counter("openbook_cache_errors", "Redis calls that failed or took too long", ["operation"])
CACHE_UP = Gauge("openbook_cache_up", "Whether the last call to it succeeded", ["tier"])

# The index tier as its clients see it.
SHARD_SECONDS = Histogram("openbook_shard_seconds", "One call to one index server", ["shard", "method"])
SHARD_ERRORS = Counter("openbook_shard_errors", "Failed calls to index servers", ["shard", "code"])
SHARD_HEDGES = Counter("openbook_shard_hedges", "Second calls to a shard beside a slow one", ["shard"])
INDEX_LIST_ERRORS = Counter("openbook_index_list_errors", "Readings of a list of index servers that came to nothing")
INDEX_SERVERS_SILENT = Gauge("openbook_index_servers_silent", "Index servers that do not answer and are probed")

# An index server; what else it knows of itself is read when somebody asks: see `index.server.metrics`.
SEARCH_SECONDS = Histogram(
    "openbook_search_seconds",
    "One search of an index server, for all whose rows it has",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
SEARCH_ROWS = Histogram(
    "openbook_search_rows", "Query rows of one search", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
)

# Alerts look at how these rise: a counter that is born with its first event never rises by it.
refused("endpoint", "keys")
for _operation in ("digest", "value"):
    CACHE_ERRORS.labels(_operation)

PROCESS = Gauge("openbook_process", "1: what this process is", ["role"])

N_METRICS_PORTS = 32
"""Tried one after the other: so many processes of one machine can be told the same port."""


class MetricsServer:
    """This process's metrics over HTTP, for Prometheus: at the first free one of N_METRICS_PORTS ports.

    Args:
        role: what the process is, such as "index-0".
        host: address to listen on.
        port: the first to try; 0 takes any free one; with None nothing is served.

    Raises:
        PortInUse: none of the ports is free.
        StartupError: the address cannot be listened on.
    """

    def __init__(self, role: str, host: str, port: int | None) -> None:
        self.port = port
        self._role = role
        PROCESS.labels(role).set(1)
        if port is None:
            return
        tried = range(port, min(port + N_METRICS_PORTS, 1 << 16)) if port else (0,)
        for each in tried:
            try:
                self._server, self._thread = start_http_server(each, host)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise StartupError(
                        f"metrics at {address_of(host, each)}: cannot listen: {error.strerror}"
                    ) from None
            else:
                self.port = self._server.server_port
                log.info("metrics of %s: http://%s/metrics", role, address_of(host, self.port))
                return
        raise PortInUse(f"metrics at {host}: ports {tried[0]}..{tried[-1]} are all taken")

    def become(self, role: str) -> None:
        """The process is something else now."""
        PROCESS.remove(self._role)
        PROCESS.labels(role).set(1)
        self._role = role

    def stop(self) -> None:
        """Serve them no more."""
        if self.port is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def new_request_id() -> str:
    """Short enough to read out, long enough to be unique among the requests of a day."""
    return uuid.uuid4().hex[:16]
