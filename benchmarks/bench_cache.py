"""What the cache saves: one embedding cached and fresh, hits under Zipf, and equal questions asked at once.

    python benchmarks/bench_cache.py [--n 20000] [--asked 100000] [--seed 0]

The embedded query encoder behind its batches and a Redis of its own, in one process and on one thread. Questions are
made up of the embedded corpus. Hits in process are counted with embeddings of one number, for `n_memory` of a tenth, a
third and all of the questions, asked by Zipf's law (the n-th most popular as often as 1 / n ** s). Prints tables, and
one JSON line.
"""

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from bench_encoder import made_up
from rich.console import Console
from rich.table import Table

from openbook.cache.memory import MemoryCache
from openbook.cache.redis import open_embeddings
from openbook.cache.server import RedisServer
from openbook.config import CacheSettings, EncoderSettings
from openbook.core.context import Context
from openbook.core.types import Float32
from openbook.models.encoder import TextEncoder
from openbook.rag.cached import Queries
from openbook.serving.workers.encoder import LocalEncoder

EXPONENTS = (0.8, 1.0, 1.2)
CROWDS = (1, 1000)


class Counting:
    """The encoder, which counts what it is asked."""

    def __init__(self, encoder: LocalEncoder) -> None:
        self._encoder = encoder
        self.fingerprint, self.dimension = encoder.fingerprint, encoder.dimension
        self.asked = 0

    async def encode(self, questions: Sequence[str], context: Context) -> Float32:
        self.asked += len(questions)
        return await self._encoder.encode(questions, context)


async def each(queries: Queries, questions: Sequence[str]) -> float:
    """Median milliseconds of one after the other."""
    taken = []
    for question in questions:
        start = time.perf_counter()
        await queries.find(question, Context())
        taken.append((time.perf_counter() - start) * 1000)
    return float(np.median(taken))


async def single(url: str, encoder: LocalEncoder, questions: Sequence[str]) -> dict[str, float]:
    """Milliseconds until one question has its embedding: fresh, from Redis, from memory."""
    found = {}
    for names in (["fresh"], ["from Redis", "from memory"]):
        cache = open_embeddings(CacheSettings.model_validate({"url": url, "timeout_s": 1.0}))
        queries = Queries(encoder, cache, time.monotonic)
        for name in names:
            found[name] = await each(queries, questions)
        await queries.aclose()
        await cache.aclose()
    return found


async def crowd(url: str, encoder: LocalEncoder, n: int) -> dict[str, float]:
    """A question that nobody asked before, asked n times at once."""
    cache = open_embeddings(CacheSettings.model_validate({"url": url, "timeout_s": 1.0}))
    counting = Counting(encoder)
    queries = Queries(counting, cache, time.monotonic)
    start = time.perf_counter()
    await asyncio.gather(*(queries.find(f"who asked {n} times?", Context()) for _ in range(n)))
    seconds = time.perf_counter() - start
    await queries.aclose()
    await cache.aclose()
    return {"n": n, "encodings": counting.asked, "ms": seconds * 1000}


async def hits(n_questions: int, n_memory: int, exponent: float, n_asked: int, seed: int) -> float:
    """Share of hits in process, from an empty cache on."""
    weights = np.arange(1, n_questions + 1) ** -exponent
    drawn = np.random.default_rng(seed).choice(n_questions, n_asked, p=weights / weights.sum())
    cache, n_hits = MemoryCache[Float32](n_memory), 0
    for question in map(str, drawn.tolist()):
        (found,) = await cache.get_many([question])
        n_hits += found is not None
        await cache.put_many([(question, np.zeros(1, np.float32))])
    return n_hits / n_asked


async def main(args: argparse.Namespace) -> None:
    """All three."""
    torch.set_num_threads(1)
    settings = EncoderSettings(n_threads=1)
    encoder = LocalEncoder(TextEncoder.load(settings), settings)
    questions = made_up(100, args.seed)
    with RedisServer() as server:
        taken = await single(server.url, encoder, questions)
        crowds = [await crowd(server.url, encoder, n) for n in CROWDS]
    sizes = [args.n // 10, args.n // 3, args.n]
    shares = {s: [await hits(args.n, size, s, args.asked, args.seed) for size in sizes] for s in EXPONENTS}
    await encoder.aclose()
    console = Console()
    table = Table("one question, median of 100", "ms")
    for name, ms in taken.items():
        table.add_row(name, f"{ms:.2f}")
    console.print(table)
    table = Table("equal questions at once", "encodings", "ms until all have theirs")
    for row in crowds:
        table.add_row(f"{row['n']:.0f}", f"{row['encodings']:.0f}", f"{row['ms']:.0f}")
    console.print(table)
    table = Table(f"hits of {args.asked} asked; n_memory", *map(str, sizes))
    for s, row_of in shares.items():
        table.add_row(f"{args.n} questions, s = {s}", *(f"{100 * share:.0f} %" for share in row_of))
    console.print(table)
    machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    print(json.dumps({"benchmark": "cache", "ms": taken, "crowds": crowds, "hits": shares, "sizes": sizes, **machine}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("n", 20_000), ("asked", 100_000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asyncio.run(main(parser.parse_args()))
