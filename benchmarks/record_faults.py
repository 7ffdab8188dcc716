"""Series for promtool, recorded from a real system while something real is wrong with it.

    python benchmarks/record_faults.py [--only NAME...]     # ... and kept in var/record_faults
    python benchmarks/record_faults.py --quiet 3600         # an hour in which nothing is wrong
    python benchmarks/record_faults.py --write tests/prometheus

The whole system, two replicas of all but the endpoint, with models that need no time, is asked 5 times a second over
gRPC. All its metrics are read every 15 s, as Prometheus would read them. After 45 s something breaks, and stays broken
for 135 s; then it is healed, where that is possible, before the next case.

`--write` makes tests of the rules from what was recorded: of each case the series that the rules speak of, what has to
fire two minutes after the fault, and that nothing fires before. `promtool test rules tests/prometheus/*.yaml`.
"""

import argparse
import asyncio
import json
import os
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from time import monotonic

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import psutil
import yaml
from faults import inject
from faults.load import Callers, probe
from faults.system import RECITE, System, running, write_snapshot
from prometheus_client.parser import text_string_to_metric_families

from openbook.config import parse
from openbook.index.client.publish import publish
from openbook.serving.access.key_redis import KeyRedisBook
from openbook.serving.access.keys import KeyRecord, mint
from openbook.serving.access.scopes import Scope
from openbook.telemetry import N_METRICS_PORTS

EVERY_S = 15.0
"""Between two scrapes, and two evaluations of the rules."""
HURT_AT_S, END_S = 45.0, 180.0
FIRES_WITHIN_S = 120
RATE = 5.0
QUIET_RATE = 1.0
RULES = Path("deploy/prometheus/rules.yaml")
Fault = Callable[["Scene"], AbstractContextManager[None]]


@dataclass
class Scene:
    """What a fault is given."""

    system: System
    callers: Callers
    questions: Path
    key: KeyRecord  # of all who ask


@dataclass(frozen=True)
class Case:
    """One thing that goes wrong, the alerts that it has to fire, and those that it may; no others."""

    name: str
    what: str
    fault: Fault
    fires: tuple[str, ...]
    may: tuple[str, ...] = ()


def index_killed(*replicas: int) -> Fault:
    """They come back when the case is over."""

    @contextmanager
    def fault(scene: Scene) -> Iterator[None]:
        chosen = [scene.system.index[i] for i in replicas]
        inject.kill(*(each.process.pid for each in chosen))
        yield
        for each in chosen:
            with each.process:
                each.process.wait()
            each.again()
        for each in chosen:
            each.wait()

    return fault


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
        add_key(scene.system, scene.key)

    return fault


@contextmanager
def cache_overwritten(scene: Scene) -> Iterator[None]:
    """Every entry becomes random bytes, again and again."""
    from redis import Redis

    over = threading.Event()

    def overwrite() -> None:
        with Redis(port=scene.system.redis[0].port) as redis:
            while not over.wait(0.1):
                for key in redis.scan_iter("openbook:*", count=1000):
                    redis.set(key, os.urandom(redis.strlen(key)), keepttl=True)

    thread = threading.Thread(target=overwrite)
    thread.start()
    yield
    over.set()
    thread.join()
    with Redis(port=scene.system.redis[0].port) as redis:
        redis.flushall()  # what has not been asked for yet would be found in the next case


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


@contextmanager
def endpoint_lost(scene: Scene) -> Iterator[None]:
    """All of Ray, as when the head loses its power. Nothing heals it: the last case."""
    kinds = ("raylet", "gcs", "controller", "proxy", "haproxy", "ingress", "encoder", "generator")
    inject.kill(*(pid for kind in kinds for pid in scene.system.pids(kind)))
    yield


CASES = (
    Case("replica-lost", "one of two replicas of a shard is killed", index_killed(2), ("OpenbookReplicaLost",)),
    Case(
        "shard-lost",
        "both replicas of a shard are killed",
        index_killed(2, 3),
        ("OpenbookShardLost", "OpenbookQuestionsFail"),
    ),
    Case(
        "shard-slow",
        "both replicas of a shard stand still most of the time",
        index_slow,
        ("OpenbookShardSlow",),
        ("OpenbookQuestionsFail",),
    ),
    Case("cache-lost", "the Redis of the cache is killed", redis_killed(0), ("OpenbookCacheLost",)),
    Case(
        "cache-overwritten", "all of the cache becomes random bytes", cache_overwritten, ("OpenbookCacheOverwritten",)
    ),
    Case("keys-lost", "the Redis of the keys is killed", redis_killed(1), ("OpenbookKeysLost",)),
    Case(
        "overload",
        "a caller asks for more than there are places",
        flood,
        ("OpenbookOverloaded",),
        ("OpenbookAnswersSlow",),
    ),
    Case(
        "generators-frozen",
        "both generators are frozen",
        stands("generator"),
        ("OpenbookQuestionsFail", "OpenbookOverloaded"),
    ),
    Case(
        "answers-slow",
        "both generators stand still most of the time",
        stands("generator", stands_s=7.0, runs_s=1.0),
        ("OpenbookAnswersSlow",),
        ("OpenbookOverloaded", "OpenbookQuestionsFail"),
    ),
    Case("crash-loop", "an encoder is killed every 20 s", encoders_crash, ("OpenbookCrashLoop",)),
    Case(
        "published-by-half",
        "a publication reaches one replica of each shard alone",
        published_by_half,
        ("OpenbookSnapshotsDiffer",),
    ),
    Case("list-lost", "the list of index servers is removed", list_lost, ("OpenbookServerListLost",)),
    Case("endpoint-lost", "all of Ray is killed", endpoint_lost, ("OpenbookEndpointLost",)),
)
QUIET = Case("quiet-hour", "nothing is wrong for an hour", lambda scene: ExitStack(), ())


# --- recording


class Scraper:
    """Reads all metrics of all processes every EVERY_S into a file, a line a scrape."""

    def __init__(self, first_port: int, out: Path) -> None:
        self._ports = range(first_port, first_port + N_METRICS_PORTS)
        self._out = out
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Scraper":
        self._out.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        begun = monotonic()
        with ThreadPoolExecutor(N_METRICS_PORTS) as pool, self._out.open("w") as file:
            while not self._over.wait(max(0.0, begun - monotonic())):
                read = pool.map(scrape, self._ports)
                instances = {f"host:{9100 + i}": samples for i, samples in enumerate(read) if samples}
                file.write(json.dumps(instances) + "\n")
                file.flush()
                begun += EVERY_S


def scrape(port: int) -> dict[str, float]:
    """Series and their values; none if nobody answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
    except OSError:
        return {}
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def add_key(system: System, record: KeyRecord) -> None:
    """Let its holder in."""
    KeyRedisBook(system.settings.access).put(lambda records: record)


def record(cases: Sequence[Case], out: Path, hurt_at_s: float, end_s: float, rate: float) -> None:
    """The cases one after the other, on one system."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, running("recorded", Path(name)) as system:
        os.environ["OPENBOOK_API_KEY"], key = mint("load", time.time(), [Scope.ASK])
        add_key(system, key)
        callers = Callers()
        questions = system.folder / "questions"
        questions.write_text("\n".join(f"where does word{i} stand, {time.time_ns():x}?" for i in range(200)))
        for case in cases:
            give_up = monotonic() + 120
            while not probe(system, callers, questions):
                if monotonic() > give_up:
                    raise RuntimeError(f"{case.name}: the system is not fit to be hurt")
            print(time.strftime("%H:%M:%S"), case.name, flush=True)
            port = system.settings.serving.metrics_port
            assert port is not None
            with Scraper(port, out / f"{case.name}.jsonl"):
                options = {"caller": "load", "timeout_s": 10.0, "check": None}
                asking = callers.ask(system.grpc, questions, rate, end_s, **options)
                time.sleep(hurt_at_s)
                with case.fault(Scene(system, callers, questions, key)):
                    time.sleep(max(0.0, asking.begun + end_s - monotonic()))
            with suppress(Exception):
                print("   ", {each.status: each.n for each in asking.result.result(60).measured.statuses}, flush=True)


# --- writing


def write(cases: Sequence[Case], recorded: Path, folder: Path, rules: Path) -> None:
    """A file of tests for each case that was recorded."""
    text = rules.read_text()
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        if (source := recorded / f"{case.name}.jsonl").exists():
            scrapes = [json.loads(line) for line in source.read_text().splitlines()]
            path = folder / f"{case.name}.yaml"
            path.write_text(test_of(case, scrapes, text, os.path.relpath(rules, folder)), encoding="utf-8")


def test_of(case: Case, scrapes: Sequence[dict[str, dict[str, float]]], rules: str, rules_path: str) -> str:
    """As `promtool test rules` reads it."""
    firing = f'ALERTS{{alertstate="firing", alertname!~"{"|".join(case.may)}"}}'
    end_s = int(EVERY_S * (len(scrapes) - 1))
    before_s = int(HURT_AT_S) if case.fires else end_s
    checks = [
        {
            "expr": f"group by (alertname) (max_over_time({firing}[{before_s}s]))",
            "eval_time": f"{before_s}s",
            "exp_samples": [],
        }
    ]
    if case.fires:
        fires = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in case.fires]
        expression = f"group by (alertname) (max_over_time({firing}[{FIRES_WITHIN_S}s]))"
        checks.append({"expr": expression, "eval_time": f"{before_s + FIRES_WITHIN_S}s", "exp_samples": fires})
    named = selectors(rules)
    series = sorted({(instance, name) for scrape in scrapes for instance, found in scrape.items() for name in found})
    kept = [each for each in series if is_read(each[1], named)]
    values = {each: [scrape.get(each[0], {}).get(each[1]) for scrape in scrapes] for each in kept}
    test = {
        "interval": f"{EVERY_S:g}s",
        "input_series": [
            {"series": in_promql(name, instance), "values": shown(values[instance, name])} for instance, name in kept
        ],
        "promql_expr_test": checks,
    }
    whole = {"rule_files": [rules_path], "evaluation_interval": f"{EVERY_S:g}s", "tests": [test]}
    about = f"# Recorded by benchmarks/record_faults.py, of {case.name}: {case.what}.\n"
    return about + yaml.safe_dump(whole, sort_keys=False, width=10_000)


def selectors(rules: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """The names of metrics in expressions, each with its matchers: label, operator, value."""
    return [
        (name, re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', chosen))
        for name, chosen in re.findall(r"\b((?:openbook|process)_\w+)(?:\{([^}]*)\})?", rules)
    ]


def is_read(series: str, named: Sequence[tuple[str, list[tuple[str, str, str]]]]) -> bool:
    """Whether one of the selectors takes this series."""
    name, _, text = series.partition("{")
    labels = json.loads("{" + text)
    return any(name == chosen and all(_fits(labels, *each) for each in matchers) for chosen, matchers in named)


def _fits(labels: dict[str, str], label: str, operator: str, value: str) -> bool:
    found = labels.get(label, "")
    is_equal = re.fullmatch(value, found) is not None if "~" in operator else found == value
    return is_equal != operator.startswith("!")


def in_promql(series: str, instance: str) -> str:
    """With the labels that Prometheus adds."""
    name, _, text = series.partition("{")
    labels = {**json.loads("{" + text), "job": "openbook", "instance": instance}
    return f"{name}{{{', '.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}"


def shown(values: Sequence[float | None]) -> str:
    """In promtool's notation: what stays for a while once, what is not there `_`, the first such scrape `stale`."""
    words, former = [], None
    for value, run in groupby(values):
        n = len(list(run))
        if value is not None:
            words.append(f"{value:.12g}" + f"+0x{n - 1}" * (n > 1))
        else:
            words += ["stale"] * (former is not None)
            missing = n - (former is not None)
            words += [f"_x{missing}"] * (missing > 0)
        former = value
    return " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=[case.name for case in CASES])
    parser.add_argument("--out", type=Path, default=Path("var/record_faults"))
    parser.add_argument("--quiet", type=float, metavar="SECONDS", help="record so long a time without a fault")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="tests from what was recorded; records nothing")
    args = parser.parse_args()
    if args.write:
        write([QUIET, *CASES], args.out, args.write, RULES)
    elif args.quiet:
        record([QUIET], args.out, args.quiet, args.quiet, QUIET_RATE)
    else:
        cases = [case for case in CASES if case.name in (args.only or {case.name})]
        record(cases, args.out, HURT_AT_S, END_S, RATE)


if __name__ == "__main__":
    main()
