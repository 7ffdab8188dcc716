"""The cases whose metrics are recorded, and the alerts that each has to fire."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil
from redis import Redis

from openbook.config import parse
from openbook.index.client.publish import publish

from . import inject
from .cases import Fault, Scene, index_killed, redis_overwritten
from .system import RECITE, write_snapshot

HURT_AT_S, END_S = 45.0, 180.0


@dataclass(frozen=True)
class Recorded:
    """One thing that goes wrong, the alerts that it has to fire, and those that it may; no others."""

    name: str
    what: str
    fault: Fault
    fires: tuple[str, ...]
    may: tuple[str, ...] = ()


def index_slow(scene: Scene) -> AbstractContextManager[None]:
    return inject.slowed(*(each.process.pid for each in scene.system.index[2:]), stands_s=1.5, runs_s=0.2)


def redis_killed(number: int) -> Fault:
    """That of the cache, or of the keys; it comes back empty, and the key is added again."""

    @contextmanager
    def fault(scene: Scene) -> Iterator[None]:
        redis = scene.system.redis[number]
        inject.kill(redis.process.pid)
        yield
        redis.process.wait()
        redis.again()
        redis.address()
        scene.system.let_in()

    return fault


@contextmanager
def cache_overwritten(scene: Scene) -> Iterator[None]:
    """Then emptied: what has not been asked for yet would be found in the next case."""
    with redis_overwritten(scene):
        yield
    with Redis(port=scene.system.redis_port) as redis:
        redis.flushall()


@contextmanager
def flood(scene: Scene) -> Iterator[None]:
    """Another caller, who asks for more than there are places: streams of two seconds, twenty a second."""
    path = scene.questions.with_name("flood")
    path.write_text("\n".join(f"{RECITE} word{i}" for i in range(400)))
    options = {"what": "stream", "formulation": "token", "n_beams": 1, "caller": "others", "timeout_s": 10.0}
    asking = scene.callers.ask(scene.system.grpc, path, 20.0, END_S - HURT_AT_S, **options, check=None)
    yield
    asking.result.result(60)


def stands(kind: str, **how: float) -> Fault:
    """All processes of a kind are frozen, or most of the time."""

    def fault(scene: Scene) -> AbstractContextManager[None]:
        pids = scene.system.pids(kind)
        return inject.slowed(*pids, **how) if how else inject.frozen(*pids)

    return fault


@contextmanager
def encoders_crash(scene: Scene) -> Iterator[None]:
    """One of them is killed every 20 s."""
    over = threading.Event()

    def crash() -> None:
        while not over.is_set():
            with suppress(RuntimeError, psutil.Error, OSError):
                inject.kill(scene.system.first("encoder"))
            over.wait(20.0)

    thread = threading.Thread(target=crash)
    thread.start()
    yield
    over.set()
    thread.join()


@contextmanager
def published_by_half(scene: Scene) -> Iterator[None]:
    """A publication reaches one replica of each shard; then it is finished."""
    second = write_snapshot(scene.system.folder / "second", "SQ8")
    assert scene.system.servers is not None
    addresses = scene.system.servers.read_text().split()

    def publish_at(at: Sequence[str]) -> None:
        asyncio.run(publish(second, parse({"index": {"addresses": list(at)}}).index))

    publish_at(addresses[::2])
    yield
    publish_at(addresses)


@contextmanager
def list_lost(scene: Scene) -> Iterator[None]:
    assert scene.system.servers is not None
    text = scene.system.servers.read_text()
    scene.system.servers.unlink()
    yield
    scene.system.servers.write_text(text)


def endpoint_lost(scene: Scene) -> AbstractContextManager[None]:
    """All of the head but Ray itself, without which there would be nobody left to record."""
    kinds = ("controller", "proxy", "haproxy", "ingress")
    return inject.frozen(*(pid for kind in kinds for pid in scene.system.pids(kind)))


RECORDED = (
    Recorded("replica-lost", "one of two replicas of a shard is killed", index_killed(2), ("OpenbookReplicaLost",)),
    Recorded(
        "shard-lost",
        "both replicas of a shard are killed",
        index_killed(2, 3),
        ("OpenbookShardLost", "OpenbookQuestionsFail"),
    ),
    Recorded(
        "shard-slow",
        "both replicas of a shard stand still most of the time",
        index_slow,
        ("OpenbookShardSlow",),
        ("OpenbookQuestionsFail",),
    ),
    Recorded("cache-lost", "the Redis of the cache is killed", redis_killed(0), ("OpenbookCacheLost",)),
    Recorded(
        "cache-overwritten", "all of the cache becomes random bytes", cache_overwritten, ("OpenbookCacheOverwritten",)
    ),
    Recorded("keys-lost", "the Redis of the keys is killed", redis_killed(1), ("OpenbookKeysLost",)),
    Recorded(
        "overload",
        "a caller asks for more than there are places",
        flood,
        ("OpenbookOverloaded",),
        ("OpenbookAnswersSlow",),
    ),
    Recorded(
        "generators-frozen",
        "both generators are frozen",
        stands("generator"),
        ("OpenbookQuestionsFail", "OpenbookOverloaded"),
    ),
    Recorded(
        "answers-slow",
        "both generators stand still most of the time",
        stands("generator", stands_s=7.0, runs_s=1.0),
        ("OpenbookAnswersSlow",),
        ("OpenbookOverloaded", "OpenbookQuestionsFail"),
    ),
    Recorded("crash-loop", "an encoder is killed every 20 s", encoders_crash, ("OpenbookCrashLoop",)),
    Recorded(
        "published-by-half",
        "a publication reaches one replica of each shard alone",
        published_by_half,
        ("OpenbookSnapshotsDiffer",),
    ),
    Recorded("list-lost", "the list of index servers is removed", list_lost, ("OpenbookServerListLost",)),
    Recorded(
        "endpoint-lost",
        "the endpoint, its proxies and Serve's controller stand still, as on a head that hangs",
        endpoint_lost,
        ("OpenbookEndpointLost",),
    ),
)
QUIET = Recorded("quiet-hour", "nothing is wrong for an hour", lambda scene: ExitStack(), ())
