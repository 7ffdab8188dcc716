"""Logging, metric names and request ids. One log line per event, readable by people, greppable by key=value."""

import logging
import os
import sys
import uuid
from functools import cache

from prometheus_client import Counter, Gauge, Histogram

from openbook.errors import InvalidConfig

CACHE_LOOKUPS = Counter("openbook_cache_lookups", "Query embeddings looked up", ["tier", "outcome"])
CACHE_ERRORS = Counter("openbook_cache_errors", "Redis calls that failed or took too long", ["operation"])
STAGE_SECONDS = Histogram("openbook_stage_seconds", "Duration of one stage of one question", ["stage"])
# Cached: `labels` would look them up under a lock every time.
requests = cache(Counter("openbook_requests", "Requests by method and outcome", ["method", "code"]).labels)
BATCH_SIZE = Histogram(
    "openbook_batch_size",
    "Questions computed at once",
    ["model"],
    buckets=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64),
)
QUEUED = Gauge("openbook_queued", "Questions waiting for a model", ["model"])
SHARD_SECONDS = Histogram("openbook_shard_seconds", "One call to one index server", ["shard", "method"])
SHARD_ERRORS = Counter("openbook_shard_errors", "Failed calls to index servers", ["shard", "code"])
SHARD_HEDGES = Counter("openbook_shard_hedges", "Second calls to a shard beside a slow one", ["shard"])
INDEX_SERVERS_SILENT = Gauge("openbook_index_servers_silent", "Index servers that do not answer and are probed")


def new_request_id() -> str:
    """Short enough to read out, long enough to be unique among the requests of a day."""
    return uuid.uuid4().hex[:16]


LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def setup_logging(name: str) -> logging.Logger:
    """Log to standard error, every line marked with the process's role, from OPENBOOK_LOG_LEVEL (INFO) upwards.

    Raises:
        InvalidConfig: there is no such level.
    """
    level = os.environ.get("OPENBOOK_LOG_LEVEL", "INFO").upper()
    if level not in LEVELS:
        raise InvalidConfig(f"OPENBOOK_LOG_LEVEL must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name:<12} %(levelname)-7s %(message)s", "%H:%M:%S"))
    root = logging.getLogger("openbook")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
    return root
