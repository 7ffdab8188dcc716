"""Deploy on a Ray cluster: find the index servers by what their nodes advertise, fill in a Serve config, hand it in.

    openbook deploy deploy/serve.yaml --index-nodes 2 --shards 4

Index servers are plain processes on the nodes with the resource `index`, shard s on port 7000 + s of each node. Their
addresses are known only once the cluster stands, so the config on disk names none.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openbook import config, local_ray
from openbook.errors import InvalidConfig, OpenbookError, StartupError
from openbook.index.client.sharded import ShardedIndex
from openbook.serving.access.exposure import check_exposure

log = logging.getLogger(__name__)

INDEX_RESOURCE = "index"
INDEX_PORT = 7000
REDIS_PORT = 6380  # 6379 is Ray's own
KEYS_PORT = 6381  # of a Redis that forgets nothing
DASHBOARD = "http://127.0.0.1:8265"
POLL_S = 2.0


def load(path: Path) -> dict[str, Any]:
    """A Serve config, checked more strictly than Serve does: it ignores keys that it does not know.

    Raises:
        InvalidConfig: names file, key and what is wrong.
    """
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    values = config.read_yaml(path)
    if not isinstance(values, dict):
        raise InvalidConfig(f"{path}: must map keys to values")
    unknown = sorted(_unknown_keys(values, "", ServeDeploySchema))
    if unknown:
        raise InvalidConfig(f"{path}: unknown keys {', '.join(unknown)}")
    try:
        ServeDeploySchema.model_validate(values)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_input=False)]
        raise InvalidConfig(f"{path}: {'; '.join(problems)}") from None
    for application in values["applications"]:
        where = f"{path}: args of {application['name']}"
        check_exposure(where, config.parse(application.get("args", {}), where).access)
    return values


def complete(
    values: dict[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    head_ip: str,
    n_shards: int,
    first_port: int = INDEX_PORT,
) -> tuple[dict[str, Any], list[str]]:
    """The config with the addresses that only a standing cluster knows, and those of the index servers among them.

    Args:
        values: a Serve config with one application.
        nodes: as `ray.nodes()` tells them.
        head_ip: where the Redis of the cache runs, unless `cache.url` names another, and that of the keys, unless
            `access.url` does.
        n_shards: index servers on each index node.
        first_port: that of shard 0; the others follow.
    """
    hosts = sorted(n["NodeManagerAddress"] for n in nodes if n["Alive"] and n["Resources"].get(INDEX_RESOURCE))
    addresses = [f"{host}:{first_port + shard}" for host in hosts for shard in range(n_shards)]
    (application,) = values["applications"]
    args = application.get("args", {})
    cache = {"url": f"redis://{head_ip}:{REDIS_PORT}/0", **args.get("cache", {})}
    index = {**args.get("index", {}), "addresses": addresses}
    filled = {**args, "index": index, "cache": cache}
    if "access" in args and args["access"].get("keys") == "redis":
        filled["access"] = {"url": f"redis://{head_ip}:{KEYS_PORT}/0", **args["access"]}
    return {**values, "applications": [{**application, "args": filled}]}, addresses


def deploy(
    path: Path,
    n_nodes: int,
    n_shards: int,
    timeout_s: float,
    first_port: int = INDEX_PORT,
    ray_address: str = "auto",
    dashboard: str = DASHBOARD,
) -> None:
    """Wait for the index tier, then deploy. Run it on the head node.

    Raises:
        InvalidConfig: as `load`.
        StartupError: the index tier is not there in time.
    """
    import ray
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    values = load(path)
    give_up = time.monotonic() + timeout_s
    with local_ray.joined(ray_address):
        while True:
            completed, addresses = complete(values, ray.nodes(), ray.util.get_node_ip_address(), n_shards, first_port)
            missing = _what_is_missing(addresses, n_nodes * n_shards)
            if not missing:
                break
            if time.monotonic() > give_up:
                raise StartupError(f"the index tier is not there after {timeout_s:.0f} s: {missing}")
            log.info("waiting for the index tier: %s", missing)
            time.sleep(POLL_S)
    ServeSubmissionClient(dashboard).deploy_applications(completed)
    log.info("deployed %s with index servers %s", path, ", ".join(addresses))


def _what_is_missing(addresses: Sequence[str], n_wanted: int) -> str:
    if len(addresses) < n_wanted:
        return f"{len(addresses)} of {n_wanted} servers"
    try:
        asyncio.run(_connect(addresses))
    except OpenbookError as error:
        return str(error)
    return ""


async def _connect(addresses: Sequence[str]) -> None:
    index = ShardedIndex(addresses, timeout_s=5.0)
    try:
        await index.connect()
    finally:
        await index.close()


def _unknown_keys(values: Any, path: str, schema: Any) -> Iterator[str]:
    """Keys, at any depth, that no model of Serve's has. What is under `args` is ours, and checked by us."""
    from ray.serve import schema as known

    nested = {
        "http_options": known.HTTPOptionsSchema,
        "grpc_options": known.gRPCOptionsSchema,
        "logging_config": known.LoggingConfig,
        "applications": known.ServeApplicationSchema,
        "deployments": known.DeploymentSchema,
        "ray_actor_options": known.RayActorOptionsSchema,
    }
    for each in values if isinstance(values, list) else [values]:
        for key, value in each.items() if isinstance(each, dict) else ():
            here = f"{path}.{key}".lstrip(".")
            if key not in schema.model_fields:
                yield here
            elif key in nested:
                yield from _unknown_keys(value, here, nested[key])
