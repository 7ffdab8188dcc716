"""What all who start Serve agree on: where the processes of a cluster listen, unless somebody says otherwise, what its
index nodes are known by, how much Serve logs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INDEX_RESOURCE = "index"
RAY_PORT = 6379
HTTP_PORT = 8000
GRPC_PORT = 9000
METRICS_PORT = 9110  # 9101 is HAProxy's
SERVE_LOGGING: dict[str, Any] = {"log_level": "WARNING", "enable_access_log": False}
"""At INFO Serve writes the `args` of an application into its log, passwords and all, for every user of the machine."""


@dataclass(frozen=True)
class ClusterPorts:
    """Of what runs under Ray beside Serve."""

    index: int = 7000  # of shard 0; the others follow
    redis: int = 6380  # of the cache; 6379 is Ray's own
    keys: int = 6381  # of a Redis that forgets nothing


def with_redis(args: dict[str, dict[str, Any]], cache_url: str, keys_url: str) -> dict[str, dict[str, Any]]:
    """The sections of an endpoint with these two, as far as it needs them."""
    filled = dict(args)
    for section, url, is_needed in (("cache", cache_url, needs_cache(args)), ("access", keys_url, needs_keys(args))):
        if is_needed:
            filled[section] = {**args.get(section, {}), "url": url}
    return filled


def needs_cache(args: Mapping[str, Any]) -> bool:
    """Whether an endpoint with these sections names no Redis for its cache."""
    return args.get("cache", {}).get("url") is None


def needs_keys(args: Mapping[str, Any]) -> bool:
    """Whether it takes its keys from a Redis, and names none."""
    access = args.get("access", {})
    return access.get("keys") == "redis" and access.get("url") is None
