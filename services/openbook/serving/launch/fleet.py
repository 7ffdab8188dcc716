"""Index servers and Redis as processes under Ray: on the nodes that are there for them, started again, gone with Ray.

A node with the resource `index` serves every shard of the snapshot that lies on it, shard s on port 7000 + s: so a
lost node never takes the only replica of a shard, where there are two such nodes. The head runs a Redis for the cache,
and one that forgets nothing for the keys. A keeper on the head looks every two seconds which nodes lack what.
"""

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from openbook.cache.server import RedisServer
from openbook.errors import StartupError
from openbook.files import at_home
from openbook.logs import setup_logging
from openbook.serving.launch.local import IndexProcess
from openbook.serving.launch.ports import INDEX_RESOURCE, ClusterPorts
from openbook.serving.launch.supervise import Supervised

log = logging.getLogger(__name__)

NAMESPACE = "openbook"
KEEPER = "keeper"
HEAD_RESOURCE = "node:__internal_head__"
EVERYWHERE = "0.0.0.0"
LOOK_EVERY_S = 2.0
SMALL = 0.001
CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Wanted:
    """What is to run on the cluster."""

    snapshot: str  # its folder on the index nodes
    n_shards: int
    ports: ClusterPorts
    has_cache: bool  # or nobody needs that Redis
    keys_folder: str  # on the head; "" for no Redis for keys
    password: str  # of both Redis; "" for none

    @property
    def index(self) -> tuple[str, int, int]:
        """All that index servers are started by."""
        return self.snapshot, self.n_shards, self.ports.index


def lacking(nodes: Iterable[Mapping[str, Any]], served: Collection[str]) -> tuple[list[str], list[str]]:
    """Ids of the nodes whose index servers are to be started, and of those that are gone.

    Args:
        nodes: as `ray.nodes()` tells them.
        served: those that have them.
    """
    there = [node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get(INDEX_RESOURCE)]
    return [each for each in there if each not in served], [each for each in served if each not in there]


class IndexNode:
    """The index servers of one node: an actor there."""

    def __init__(self, wanted: Wanted) -> None:
        setup_logging("index-node")
        self._wanted = wanted
        self._servers = [self._begun(shard) for shard in range(wanted.n_shards)]

    def serve(self) -> None:
        """Returns once all of them answered for the first time.

        Raises:
            StartupError: some do not start. Those are begun anew, and the others go on.
        """
        problems = []
        for shard, server in enumerate(self._servers):
            try:
                server.address()
            except Exception as error:  # whatever it is: nobody else looks after this one
                problems.append(str(error))
                server.stop()
                self._servers[shard] = self._begun(shard)
        if problems:
            raise StartupError("; ".join(problems))

    def _begun(self, shard: int) -> Supervised:
        folder, port = at_home(self._wanted.snapshot), self._wanted.ports.index + shard
        begin = partial(IndexProcess, folder, shard, host=EVERYWHERE, port=port)
        return Supervised(f"the index server of shard {shard}", begin)


class Keeper:
    """Sees to it that what is wanted runs: an actor on the head."""

    def __init__(self, wanted: Wanted) -> None:
        setup_logging("keeper")
        self._wanted = wanted
        self._redis = self._start_redis()
        self._nodes: dict[str, Any] = {}
        self._asked: dict[Any, str] = {}
        self._serving: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def wanted(self) -> Wanted | None:
        """What it sees to; nothing once it was told to stop."""
        return None if self._stopped.is_set() else self._wanted

    def serve(self) -> None:
        """Returns once Redis answers. Raises StartupError."""
        for redis in self._redis:
            redis.address()

    def stop(self, successor: Wanted | None = None) -> None:
        """End all of it, but for index servers that the successor wants too: its keeper finds them by their name."""
        self._stopped.set()
        self._thread.join()  # its last look would begin anew what is ended here
        for redis in self._redis:
            redis.stop()
        if successor is None or successor.index != self._wanted.index:
            for node in self._nodes.values():
                ray.kill(node)

    def _start_redis(self) -> list[Supervised]:
        redis = partial(RedisServer, host=EVERYWHERE, password=self._wanted.password)
        begins = []
        if self._wanted.has_cache:
            cache = partial(redis, port=self._wanted.ports.redis, max_memory_bytes=CACHE_BYTES)
            begins.append(("the cache's Redis", cache))
        if self._wanted.keys_folder:
            folder = at_home(self._wanted.keys_folder)
            begins.append(("the keys' Redis", partial(redis, port=self._wanted.ports.keys, keeps_in=folder)))
        return [Supervised(name, begin) for name, begin in begins]

    def _go_on(self) -> None:
        while not self._stopped.is_set():
            try:
                self._look()
            except (ray.exceptions.RayError, RuntimeError) as error:  # also: no thread is left
                log.warning("the cluster cannot be looked at: %s", error)
            self._stopped.wait(LOOK_EVERY_S)

    def _look(self) -> None:
        for i, redis in enumerate(self._redis):
            self._redis[i] = redis.or_anew()
        for ref in _done(list(self._asked)):
            node = self._asked.pop(ref)
            try:
                ray.get(ref)
                if node not in self._serving:
                    log.info("node %s serves its index", node)
                    self._serving.add(node)
            except ray.exceptions.RayError as error:
                log.warning("node %s does not serve all of its index, and is asked again: %s", node, error)
                self._serving.discard(node)
                # Never ended: it begins anew what does not start, and who cannot be asked may serve all the same. It
                # is found by its name.
                self._nodes.pop(node, None)
        missing, gone = lacking(ray.nodes(), self._nodes)
        for node in gone:
            del self._nodes[node]
            self._serving.discard(node)
            log.warning("index node %s is gone", node)
        for node in missing:
            self._nodes[node] = (
                ray.remote(IndexNode)
                .options(
                    name=f"index-{node}",
                    namespace=NAMESPACE,
                    lifetime="detached",
                    get_if_exists=True,
                    max_restarts=-1,
                    num_cpus=0,
                    resources={INDEX_RESOURCE: SMALL},
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                .remote(self._wanted)
            )
        # All of them, again and again: an actor that Ray has started anew may have found no snapshot.
        for node in self._nodes.keys() - self._asked.values():
            self._asked[self._nodes[node].serve.remote()] = node


def _done(refs: list[Any]) -> list[Any]:
    return list(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else []


def keep(wanted: Wanted, timeout_s: float) -> None:
    """Have what is wanted run from now on; nothing if it does already. This process has joined the cluster.

    Raises:
        ray.exceptions.RayError: the keeper does not start.
    """
    try:
        keeper = ray.get_actor(KEEPER, NAMESPACE)
        if ray.get(keeper.wanted.remote(), timeout=timeout_s) == wanted:
            try:
                ray.get(keeper.serve.remote(), timeout=timeout_s)
                return
            except ray.exceptions.RayTaskError as error:
                log.warning("what did not start is started anew: %s", error.cause)
        try:
            ray.get(keeper.stop.remote(wanted), timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:  # perhaps it is of a version that knows of no successor
            log.warning("the former keeper does not stop, and is ended: %s", error.cause)
        ray.kill(keeper)
    except ValueError:  # there is none
        pass
    keeper = (
        ray.remote(Keeper)
        .options(
            name=KEEPER,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=4,
            resources={HEAD_RESOURCE: SMALL},
        )
        .remote(wanted)
    )
    ray.get(keeper.serve.remote(), timeout=timeout_s)
