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
import json
import os
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from time import monotonic

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import yaml
from faults.cases import Scene
from faults.load import Callers, probe
from faults.recorded import END_S, HURT_AT_S, QUIET, RECORDED, Recorded
from faults.system import running
from prometheus_client.parser import text_string_to_metric_families

from openbook.telemetry import N_METRICS_PORTS

EVERY_S = 15.0
"""Between two scrapes, and two evaluations of the rules."""
FIRES_WITHIN_S = 120
RATE = 5.0
QUIET_RATE = 1.0
RULES = Path("deploy/prometheus/rules.yaml")


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


def record(cases: Sequence[Recorded], out: Path, hurt_at_s: float, end_s: float, rate: float) -> None:
    """The cases one after the other, on one system."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, running("recorded", Path(name)) as system:
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
                with case.fault(Scene(system, callers, questions, [])):
                    time.sleep(max(0.0, asking.begun + end_s - monotonic()))
            with suppress(Exception):
                print("   ", {each.status: each.n for each in asking.result.result(60).measured.statuses}, flush=True)


# --- writing


def write(cases: Sequence[Recorded], recorded: Path, folder: Path, rules: Path) -> None:
    """A file of tests for each case that was recorded."""
    text = rules.read_text()
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        if (source := recorded / f"{case.name}.jsonl").exists():
            scrapes = [json.loads(line) for line in source.read_text().splitlines()]
            path = folder / f"{case.name}.yaml"
            path.write_text(test_of(case, scrapes, text, os.path.relpath(rules, folder)), encoding="utf-8")


def test_of(case: Recorded, scrapes: Sequence[dict[str, dict[str, float]]], rules: str, rules_path: str) -> str:
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
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=[case.name for case in RECORDED])
    parser.add_argument("--out", type=Path, default=Path("var/record_faults"))
    parser.add_argument("--quiet", type=float, metavar="SECONDS", help="record so long a time without a fault")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="tests from what was recorded; records nothing")
    args = parser.parse_args()
    if args.write:
        write([QUIET, *RECORDED], args.out, args.write, RULES)
    elif args.quiet:
        record([QUIET], args.out, args.quiet, args.quiet, QUIET_RATE)
    else:
        cases = [case for case in RECORDED if case.name in (args.only or {case.name})]
        record(cases, args.out, HURT_AT_S, END_S, RATE)


if __name__ == "__main__":
    main()
