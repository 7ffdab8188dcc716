"""The cases: what breaks, in which layout of the system, for how long. One line of the table each."""

import asyncio
import os
import resource
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import psutil
from redis import Redis
from redis.exceptions import RedisError

from openbook.v1.answer_pb2 import AnswerRequest, Formulation
from openbook.v1.answer_pb2_grpc import AnswerServiceStub

from . import inject
from .inject import Mode, TcpProxy
from .load import Callers
from .system import RECITE, IndexReplica, System

if TYPE_CHECKING:
    from openbook.v1.answer_pb2_grpc import AnswerServiceAsyncStub

HURT_AT_S, HEAL_AT_S, END_S = 4.0, 9.0, 20.0
N_VANISH = 200
FLOOD = 300.0
CLOCK_STEP_S = 3600.0


@dataclass
class Scene:
    """What a fault is given."""

    system: System
    callers: Callers
    questions: Path
    notes: list[str]  # what is to be said beside the figures


Fault = Callable[[Scene], AbstractContextManager[None]]
"""Entered it hurts, left it heals, as far as the benchmark does."""


@dataclass(frozen=True)
class Case:
    """One of them."""

    name: str
    layout: str
    what: str
    fault: Fault
    heals: bool = True  # or the system has to help itself
    repeats: bool = False  # few questions, again and again: their embeddings are in Redis


def kills(kind: str) -> Fault:
    """SIGKILL for the first process of a kind."""

    @contextmanager
    def fault(scene: Scene) -> Iterator[None]:
        inject.kill(scene.system.first(kind))
        yield

    return fault


def freezes(kind: str) -> Fault:
    """SIGSTOP, then SIGCONT, for the first process of a kind."""
    return lambda scene: inject.frozen(scene.system.first(kind))


def slows(kind: str) -> Fault:
    """The first process of a kind stands still half of the time."""
    return lambda scene: inject.slowed(scene.system.first(kind))


@contextmanager
def nothing(scene: Scene) -> Iterator[None]:
    yield


# Redis


@contextmanager
def redis_full(scene: Scene) -> Iterator[None]:
    with Redis(port=scene.system.redis_port) as redis:
        former = redis.config_get("maxmemory*")
        for name, value in (("maxmemory-policy", "noeviction"), ("maxmemory", "1")):
            redis.config_set(name, value)
        try:
            redis.set("x", "y")
        except RedisError as error:
            scene.notes.append(f"Redis: {error}")
        yield
        for name in ("maxmemory", "maxmemory-policy"):
            redis.config_set(name, former[name])


@contextmanager
def redis_overwritten(scene: Scene) -> Iterator[None]:
    over, n = threading.Event(), Counter[str]()

    def overwrite() -> None:
        with Redis(port=scene.system.redis_port) as redis:
            while not over.wait(0.1):
                for key in redis.scan_iter("openbook:*", count=1000):
                    redis.set(key, os.urandom(redis.strlen(key)), keepttl=True)
                    n["entries"] += 1

    thread = threading.Thread(target=overwrite)
    thread.start()
    yield
    over.set()
    thread.join()
    scene.notes.append(f"{n['entries']} entries overwritten")


@contextmanager
def redis_flushed(scene: Scene) -> Iterator[None]:
    with Redis(port=scene.system.redis_port) as redis:
        redis.flushall()
    yield


def redis_network(mode: Mode) -> Fault:
    """Between the endpoint and Redis."""
    return lambda scene: _proxy(scene.system.redis_proxy).does(mode)


def _proxy(proxy: TcpProxy | None) -> TcpProxy:
    assert proxy is not None
    return proxy


# The endpoint


@contextmanager
def disk_full(scene: Scene) -> Iterator[None]:
    pids = scene.system.pids("ingress")
    with inject.limited(resource.RLIMIT_FSIZE, dict.fromkeys(pids, 0)):
        yield


@contextmanager
def no_descriptors(scene: Scene) -> Iterator[None]:
    pids = scene.system.pids("ingress")
    with inject.limited(resource.RLIMIT_NOFILE, {pid: psutil.Process(pid).num_fds() for pid in pids}):
        yield


@contextmanager
def streams_vanish(scene: Scene) -> Iterator[None]:
    async def one(stub: "AnswerServiceAsyncStub") -> str:
        token_by_token = AnswerRequest(
            question=f"{RECITE} word7", formulation=Formulation.FORMULATION_TOKEN, n_beams=1, timeout_s=20.0
        )
        call = stub.AnswerStream(token_by_token)
        try:
            async for _ in call:
                call.cancel()
                return "vanished"
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "ended"

    async def crowd() -> Counter[str]:
        async with grpc.aio.insecure_channel(scene.system.grpc) as channel:
            stub = AnswerServiceStub(channel)  # which is an AnswerServiceAsyncStub
            return Counter(await asyncio.gather(*(one(stub) for _ in range(N_VANISH))))

    found = scene.callers.start(crowd()).result(60)
    scene.notes.append(f"streams: {_told(found)}")
    yield


def more(rate: float, timeout_s: float) -> Fault:
    """Others who ask beside the load."""

    @contextmanager
    def fault(scene: Scene) -> Iterator[None]:
        options = {"timeout_s": timeout_s, "caller": "others"}
        asking = scene.callers.ask(scene.system.grpc, scene.questions, rate, HEAL_AT_S - HURT_AT_S, **options)
        yield
        statuses = asking.result.result(60).measured.statuses
        scene.notes.append(f"the others: {_told({each.status: each.n for each in statuses})}")

    return fault


def _told(counts: "Counter[str] | dict[str, int]") -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items())


# The index tier


def index(hurt: Callable[..., AbstractContextManager[None]], *replicas: int) -> Fault:
    """One of the two replicas of shard 1, or both: those with the numbers 2 and 3."""

    @contextmanager
    def fault(scene: Scene) -> Iterator[None]:
        with hurt(*(scene.system.index[i].process.pid for i in replicas)):
            yield

    return fault


def index_killed(*replicas: int) -> Fault:
    """They are started again where they were."""

    @contextmanager
    def fault(scene: Scene) -> Iterator[None]:
        chosen: list[IndexReplica] = [scene.system.index[i] for i in replicas]
        for each in chosen:
            inject.kill(each.process.pid)
        yield
        for each in chosen:
            with each.process:
                each.process.wait()
            each.again()
        for each in chosen:
            each.wait()

    return fault


def index_cut(scene: Scene) -> AbstractContextManager[None]:
    return _proxy(scene.system.index_proxy).does(Mode.CUT)


@contextmanager
def only_shard_killed(scene: Scene) -> Iterator[None]:
    lines = {pid: psutil.Process(pid).cmdline() for pid in scene.system.pids("index")}
    inject.kill(*(pid for pid, line in lines.items() if line[line.index("--shard") + 1] == "1"))
    yield


# The machine


def clock_steps(seconds: float) -> Fault:
    """The wall clock of everything in Python: index servers, replicas, Serve's controller."""

    @contextmanager
    def fault(scene: Scene) -> Iterator[None]:
        assert scene.system.clock is not None
        for offset in (seconds, 0.0):
            with scene.system.clock.open("r+b") as file:
                file.write(struct.pack("d", offset))
            if offset:
                yield

    return fault


@contextmanager
def node_lost(scene: Scene) -> Iterator[None]:
    node = scene.system.node
    assert node is not None
    family = [node.pid, *(each.pid for each in psutil.Process(node.pid).children(recursive=True))]
    kinds = Counter(kind for pid in family if (kind := scene.system.kind(pid)))
    scene.notes.append(f"on it: {_told(kinds)}")
    inject.kill(*family)
    yield


CASES = (
    Case("nothing", "fused", "nothing breaks", nothing, heals=False),
    Case("redis-killed", "fused", "Redis is killed", kills("redis"), heals=False, repeats=True),
    Case("redis-frozen", "fused", "Redis is frozen for 5 s", freezes("redis"), repeats=True),
    Case("redis-full", "fused", "Redis is full and evicts nothing, 5 s", redis_full),
    Case(
        "redis-overwritten",
        "fused",
        "all entries become random bytes, ten times a second",
        redis_overwritten,
        repeats=True,
    ),
    Case("redis-flushed", "fused", "Redis loses all entries", redis_flushed, heals=False, repeats=True),
    Case("ingress-killed", "fused", "one of 2 ingress replicas is killed", kills("ingress"), heals=False),
    Case("ingress-frozen", "fused", "one of 2 ingress replicas is frozen for 5 s", freezes("ingress")),
    Case("ingress-slow", "fused", "one of 2 ingress replicas stands still half of the time, 5 s", slows("ingress")),
    Case("ingress-disk-full", "fused", "ingress replicas cannot write to any file, 5 s", disk_full),
    Case("ingress-no-descriptors", "fused", "ingress replicas can open no files or sockets, 5 s", no_descriptors),
    Case("index-killed", "fused", "one of 2 replicas of a shard is killed, back after 5 s", index_killed(2)),
    Case("index-frozen", "fused", "one of 2 replicas of a shard is frozen for 5 s", index(inject.frozen, 2)),
    Case(
        "index-slow",
        "fused",
        "one of 2 replicas of a shard stands still half of the time, 5 s",
        index(inject.slowed, 2),
    ),
    Case("index-cut", "fused", "the network to one of 2 replicas is cut for 5 s", index_cut),
    Case("shard-killed", "fused", "both replicas of a shard are killed, back after 5 s", index_killed(2, 3)),
    Case("shard-frozen", "fused", "both replicas of a shard are frozen for 5 s", index(inject.frozen, 2, 3)),
    Case("streams-vanish", "fused", "200 streams are left after the first event", streams_vanish, heals=False),
    Case("tiny-deadlines", "fused", "others ask 10/s with a deadline of 1 ms, 5 s", more(10.0, 0.001)),
    Case("flood", "fused", "another caller asks 300/s for 5 s", more(FLOOD, 3.0)),
    Case("clock-forward", "fused", "the wall clock is an hour ahead for 5 s", clock_steps(CLOCK_STEP_S)),
    Case("clock-back", "fused", "the wall clock is an hour behind for 5 s", clock_steps(-CLOCK_STEP_S)),
    Case("controller-killed", "fused", "Serve's controller is killed", kills("controller"), heals=False),
    Case("proxy-killed", "fused", "Serve's actor that keeps HAProxy is killed", kills("proxy"), heals=False),
    Case("haproxy-killed", "fused", "HAProxy is killed", kills("haproxy"), heals=False),
    Case("nothing-split", "split", "nothing breaks", nothing, heals=False),
    Case("encoder-killed", "split", "one of 2 encoder replicas is killed", kills("encoder"), heals=False),
    Case("encoder-frozen", "split", "one of 2 encoder replicas is frozen for 5 s", freezes("encoder")),
    Case("encoder-slow", "split", "one of 2 encoder replicas stands still half of the time, 5 s", slows("encoder")),
    Case("generator-killed", "split", "one of 2 generator replicas is killed", kills("generator"), heals=False),
    Case("generator-frozen", "split", "one of 2 generator replicas is frozen for 5 s", freezes("generator")),
    Case(
        "generator-slow", "split", "one of 2 generator replicas stands still half of the time, 5 s", slows("generator")
    ),
    Case("redis-slow", "split", "every reply of Redis takes 200 ms more, 5 s", redis_network(Mode.SLOW), repeats=True),
    Case("redis-nonsense", "split", "Redis answers random bytes, 5 s", redis_network(Mode.NONSENSE), repeats=True),
    Case("redis-cut", "split", "the network to Redis is cut for 5 s", redis_network(Mode.CUT), repeats=True),
    Case(
        "only-shard-killed",
        "split",
        "the only server of a shard is killed; half the passages are enough",
        only_shard_killed,
        heals=False,
    ),
    Case("only-ingress-killed", "split", "the only ingress replica is killed", kills("ingress"), heals=False),
    Case("node-lost", "nodes", "one of 2 nodes of Ray is killed with all that runs on it", node_lost, heals=False),
)
