"""Deploy on a Ray cluster: start index servers and Redis, fill in where they are, hand in a Serve config.

    openbook deploy serve ~/openbook/serve.yaml --index-nodes 2 --shards 4 --snapshot ~/openbook/snapshot

Index servers are plain processes on the nodes with the resource `index`, shard s on port 7000 + s of each node. Their
addresses are known only once the cluster stands, and change with its nodes, so the config on disk names none.
"""

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openbook import config, local_ray
from openbook.config import IndexClientSettings
from openbook.errors import InvalidConfig, OpenbookError, StartupError, reason
from openbook.files import at_home
from openbook.index.client.discovery import combined
from openbook.index.client.sharded import ShardedIndex
from openbook.serving.access.exposure import check_exposure
from openbook.serving.launch.ports import (
    INDEX_RESOURCE,
    SERVE_LOGGING,
    ClusterPorts,
    needs_cache,
    needs_keys,
    with_redis,
)
from openbook.serving.nodes import hosts_with, source_on_ray

log = logging.getLogger(__name__)

KEYS_FOLDER = "~/openbook/keys"
DEFAULT_PORTS = ClusterPorts()
DASHBOARD = "http://127.0.0.1:8265"
POLL_S = 2.0
GRACE_S = 120.0
"""For those that are missing, where a server of each shard is there: a lost machine must not hold up all others."""


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
    applications = values["applications"]
    if len(applications) != 1:
        raise InvalidConfig(f"{path}: applications: must be one, got {len(applications)}")
    where = f"{path}: args of {applications[0].get('name', 'default')}"
    check_exposure(where, config.parse(applications[0].get("args", {}), where).access)
    return values


def complete(
    values: dict[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    head_ip: str,
    n_shards: int,
    ports: ClusterPorts = DEFAULT_PORTS,
    password: str = "",
) -> tuple[dict[str, Any], IndexClientSettings]:
    """The config with the addresses that only a standing cluster knows, and how its index servers are reached by now.

    Args:
        values: a Serve config with one application.
        nodes: as `ray.nodes()` tells them.
        head_ip: where the Redis of the cache runs, unless `cache.url` names another, and that of the keys, unless
            `access.url` does.
        n_shards: index servers on each index node.
        ports: of index servers and Redis.
        password: of the Redis on the head; "" for none.
    """
    of_shards = range(ports.index, ports.index + n_shards)
    (application,) = values["applications"]
    args = application.get("args", {})
    redis = f"redis://{f':{password}@' if password else ''}{head_ip}"
    index = {"discover": f"ray://{INDEX_RESOURCE}:{of_shards[0]}-{of_shards[-1]}", **args.get("index", {})}
    if index.get("addresses"):
        del index["discover"]
    filled = with_redis({**args, "index": index}, f"{redis}:{ports.redis}/0", f"{redis}:{ports.keys}/0")
    settings = config.parse({"index": index}).index
    if source_on_ray(settings):
        settings = settings.at(tuple(combined(hosts_with(nodes, INDEX_RESOURCE), of_shards)))
    quiet = {**SERVE_LOGGING, **(values.get("logging_config") or {})}
    return {**values, "logging_config": quiet, "applications": [{**application, "args": filled}]}, settings


def password() -> str:
    """Of the cluster's Redis: who has Ray's token knows it. "" for a Ray without one. Raises InvalidConfig."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return ""
    return password_of(Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"))


def password_of(token: Path) -> str:
    """As `password`, by the file of Ray's token."""
    try:
        text = at_home(token).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{token}: Ray's token cannot be read: {reason(error)}") from None
    return hashlib.sha256(b"openbook's Redis: " + text.encode()).hexdigest()


def deploy(
    path: Path,
    n_nodes: int,
    n_shards: int,
    timeout_s: float,
    ports: ClusterPorts = DEFAULT_PORTS,
    ray_address: str = "auto",
    dashboard: str = DASHBOARD,
    snapshot: str | None = None,
) -> None:
    """Wait for the index tier, deploy, and wait until Serve has taken it up. Run it on the head node.

    Args:
        path: of the Serve config.
        n_nodes: with index servers, to wait for.
        n_shards: on each of them.
        timeout_s: to wait so long for each of both; `GRACE_S` where a server of each shard is there.
        ports: of index servers and Redis.
        ray_address: of the cluster.
        dashboard: that takes the config.
        snapshot: its folder on the index nodes, whose servers are started with Redis, see `fleet`; None: they run.

    Raises:
        InvalidConfig: as `load`.
        StartupError: the index tier is not there in time, or the application fails or does not run in time.
    """
    import ray

    values = load(path)
    give_up = time.monotonic() + timeout_s
    known, whole_since = "", None
    with local_ray.joined(ray_address):
        node = ray.get_runtime_context().get_node_id()
        if snapshot is not None:
            from openbook.serving.launch import fleet

            known, args = password(), values["applications"][0].get("args", {})
            keys_folder = KEYS_FOLDER if needs_keys(args) else ""
            fleet.keep(fleet.Wanted(snapshot, n_shards, ports, needs_cache(args), keys_folder, known), timeout_s)
        while True:
            here = ray.util.get_node_ip_address()
            completed, index = complete(values, ray.nodes(), here, n_shards, ports, known)
            now = time.monotonic()
            error, few = _why_not(index), _how_few(index, n_nodes * n_shards)
            whole_since = None if error else whole_since or now
            if whole_since and (not few or now - whole_since > GRACE_S):
                break
            missing = few or error
            if now > give_up:
                raise StartupError(f"the index tier is not there after {timeout_s:.0f} s: {missing}")
            log.info("waiting for the index tier: %s", missing)
            time.sleep(POLL_S)
    if few:
        log.warning("deploying with %s: those that are missing are found once they are there", few)
    client = handed_in(completed, dashboard, timeout_s)
    log.info("handed in %s with index servers %s", path, ", ".join(index.addresses))
    name = completed["applications"][0].get("name", "default")
    wait_until_running(client, name, timeout_s, node)
    log.info("deployed: %s runs as %s says", name, path)


def handed_in(values: Mapping[str, Any], dashboard: str, timeout_s: float) -> Any:
    """A `ServeSubmissionClient`, once Ray's dashboard has taken the config, for which it is tried so long. Raises
    StartupError: it has not, or refuses it; carries what it says.
    """
    from ray.dashboard.modules.serve import sdk

    clients = []

    def hand_in() -> str:
        client = sdk.ServeSubmissionClient(dashboard)
        client.deploy_applications(values)
        clients.append(client)
        return ""

    _wait("the config to be taken", hand_in, timeout_s, f"the config cannot be handed in after {timeout_s:.0f} s")
    return clients[0]


def wait_until_running(client: Any, name: str, timeout_s: float, node: str) -> None:
    """Serve takes a config up behind our back, and waits for ever where there is no room for its replicas. What
    runs can be asked once the proxy of this node, the head, answers, too. `client` is a `ServeSubmissionClient`. Raises
    StartupError: it fails, or does not run in time; carries what Serve says.
    """

    def look() -> str:
        details = client.get_serve_details()
        found = details["applications"].get(name, {"status": "NOT_STARTED"})
        if found["status"] == "DEPLOY_FAILED":
            raise StartupError(f"{name} cannot be deployed: {_not_healthy(found)}")
        return _no_proxy(details, node) if found["status"] == "RUNNING" else _not_healthy(found)

    _wait(name, look, timeout_s, f"{name} does not run after {timeout_s:.0f} s, and Serve goes on trying")


def _wait(what: str, look: Callable[[], str], timeout_s: float, late: str) -> None:
    """Until nothing is missing when we look, by way of Ray's dashboard, which may be away for a moment. Raises
    StartupError: something still is after that time; or the dashboard refuses us, as it would again.
    """
    give_up, said = time.monotonic() + timeout_s, ""
    while True:
        try:
            missing = look()
        except (RuntimeError, OSError) as error:
            missing = f"Ray's dashboard: {error}"
            if isinstance(error, RuntimeError) and "status code 5" not in missing:  # Ray has no class for either
                raise StartupError(missing) from None
        if not missing:
            return
        if time.monotonic() > give_up:
            raise StartupError(f"{late}: {missing}")
        if missing != said:
            log.info("waiting for %s: %s", what, missing)
        said = missing
        time.sleep(POLL_S)


def _not_healthy(application: Mapping[str, Any]) -> str:
    """What Serve says of it, and of those of its deployments that are not as they should be."""
    parts = {"": application, **application.get("deployments", {})}
    return "; ".join(
        f"{name} {each['status']} {each.get('message', '')}".strip()
        for name, each in parts.items()
        if each["status"] != "HEALTHY"
    )


def _no_proxy(details: Mapping[str, Any], node: str) -> str:
    """Nothing if Serve's proxy there answers, or there is to be none."""
    proxies = details["proxies"]
    if details.get("proxy_location") == "Disabled" or proxies.get(node, {}).get("status") == "HEALTHY":
        return ""
    said = ", ".join(f"{each['node_ip']} {each['status']}" for each in proxies.values())
    return f"no proxy answers on the head{said and ': ' + said}"


def _how_few(index: IndexClientSettings, n_wanted: int) -> str:
    """Nothing if there are as many as are wanted, or nobody knows."""
    n = len(index.addresses)
    return "" if index.discover or n >= n_wanted else f"{n} of {n_wanted} servers"


def _why_not(index: IndexClientSettings) -> str:
    """Nothing if a server of each shard answers."""
    try:
        asyncio.run(_connect(index))
    except OpenbookError as error:
        return str(error)
    return ""


async def _connect(settings: IndexClientSettings) -> None:
    index = ShardedIndex.of(settings)
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
