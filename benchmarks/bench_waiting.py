"""How long questions wait at best: generators and what they are asked, and nothing else.

    python benchmarks/bench_waiting.py CONTEXTS [--share 0.62]

CONTEXTS is what `bench_serving.py` leaves in `var/bench_serving/contexts.jsonl`. Measures how long one generator of an
endpoint with default settings takes for batches of 1 to 16 of them, then reckons how long questions take that come at a
share of the most that so many generators can do (0.62: 70 % of an endpoint that does 0.89 of it): evenly, or as
Poisson's, to

- batches: whoever is free takes all that wait, up to 16;
- joining: a question begins at once at the generator that has fewest, and all there go on together, as fast as a batch
  of so many does. No real one could do better than that.

There is no network, no encoder, no search, no router that does not know everything. Prints a table.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from bench_serving import read_contexts
from rich.console import Console
from rich.table import Table

from openbook.config import Settings
from openbook.models.generator import RagGenerator
from openbook.serving.launch.fitting import fitted

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
N_QUESTIONS = 40_000


def measured(path: Path, settings: Settings) -> dict[int, list[float]]:
    """Seconds of batches of each size."""
    asked = read_contexts(path)
    generator, defaults = RagGenerator.load(settings.generator), settings.answer.generation()
    generator.generate(*zip(*asked[:4], strict=True), defaults)
    rng, found = random.Random(0), {}
    for size in SIZES:
        found[size] = []
        for _ in range(max(6, 24 // size)):
            batch, begun = rng.sample(asked, size), time.perf_counter()
            generator.generate(*zip(*batch, strict=True), defaults)
            found[size].append(time.perf_counter() - begun)
    return found


def arrivals(rate: float, evenly: bool, rng: random.Random) -> Iterator[float]:
    now = 0.0
    for _ in range(N_QUESTIONS):
        now += 1 / rate if evenly else rng.expovariate(rate)
        yield now


class Times:
    """Of batches, drawn out of what was measured."""

    def __init__(self, found: dict[int, list[float]]) -> None:
        every = range(SIZES[-1] + 1)
        self.mean = np.interp(every, SIZES, [statistics.mean(found[n]) for n in SIZES]).tolist()
        self._deviation = np.interp(every, SIZES, [statistics.stdev(found[n]) for n in SIZES]).tolist()

    def draw(self, n: int, rng: random.Random) -> float:
        return max(0.3 * self.mean[n], rng.gauss(self.mean[n], self._deviation[n]))


def in_batches(times: Times, came: list[float], n_replicas: int, rng: random.Random) -> list[float]:
    """Seconds that each question takes."""
    free, took, i = [0.0] * n_replicas, list[float](), 0
    while i < len(came):
        which = min(range(n_replicas), key=free.__getitem__)
        now, end = max(free[which], came[i]), i + 1
        while end < len(came) and came[end] <= now and end - i < SIZES[-1]:
            end += 1
        free[which] = now + times.draw(end - i, rng)
        took += [free[which] - each for each in came[i:end]]
        i = end
    return took


def joining(times: Times, came: list[float], n_replicas: int, rng: random.Random) -> list[float]:
    """Seconds that each question takes."""
    at_work: list[list[list[float]]] = [[] for _ in range(n_replicas)]  # what is left of each, and when it came
    took, now, i = list[float](), 0.0, 0
    while i < len(came) or any(at_work):
        next_s, ended = (came[i] - now if i < len(came) else float("inf")), None
        for there in filter(None, at_work):
            soonest = min(there)
            if (seconds := soonest[0] * times.mean[min(len(there), SIZES[-1])]) < next_s:
                next_s, ended = seconds, (there, soonest)
        for there in filter(None, at_work):
            for each in there:
                each[0] -= next_s / times.mean[min(len(there), SIZES[-1])]
        now += next_s
        if ended:
            ended[0].remove(ended[1])
            took.append(now - ended[1][1])
        else:
            min(at_work, key=len).append([times.draw(1, rng) / times.mean[1], now])
            i += 1
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contexts", type=Path)
    parser.add_argument("--share", type=float, default=0.62)
    args = parser.parse_args()
    settings = fitted(Settings())
    n_replicas, times = settings.serving.n_replicas, Times(measured(args.contexts, settings))
    rate = args.share * n_replicas * SIZES[-1] / times.mean[SIZES[-1]]
    table = Table(title=f"{n_replicas} generators, {rate:.2f} questions a second, times in ms")
    for title in ("questions come", "they", "p50", "p99", "p99/p50"):
        table.add_column(title)
    for evenly in (False, True):
        for way in (in_batches, joining):
            rng = random.Random(1)
            took = way(times, list(arrivals(rate, evenly, rng)), n_replicas, rng)
            p50, p99 = np.percentile(took[len(took) // 10 :], [50, 99]) * 1000
            name = "evenly" if evenly else "as Poisson's"
            table.add_row(name, way.__name__, f"{p50:.0f}", f"{p99:.0f}", f"{p99 / p50:.2f}")
    console = Console(width=100)
    console.print("seconds of a batch of " + ", ".join(f"{n}: {times.mean[n]:.2f}" for n in SIZES))
    console.print(table)


if __name__ == "__main__":
    main()
