"""What is found, and whether it is well. No I/O."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from openbook.terminal import counted

MIN_OPEN_FILES = 65_536
MIN_SHARED_BYTES = 1 << 30
MIN_FREE_BYTES = 10 << 30
MAX_OFFSET_S = 2.0
SLOW_TO_START = "rfc3987-syntax"
"""Where it is, jsonschema imports it, and Ray that: it compiles a grammar in each process that starts, for seconds."""
SOON_S = 30 * 86_400.0


class Level(IntEnum):
    """How bad it is."""

    WELL = 0
    MIND = 1  # it serves, and will give trouble
    ILL = 2  # it does not serve


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report."""

    what: str
    level: Level
    says: str


def versions(found: Mapping[str, str]) -> Finding:
    """Of what is installed, by name of the package."""
    both = {"faiss-cpu", "faiss-gpu"} <= found.keys()
    said = ", ".join(f"{name} {version}" for name, version in found.items())
    if both:
        return Finding("versions", Level.ILL, f"faiss-cpu and faiss-gpu exclude each other; {said}")
    if not {"faiss-cpu", "faiss-gpu"} & found.keys():
        return Finding("versions", Level.MIND, f"no faiss: this machine can ask an index, and serve none; {said}")
    if SLOW_TO_START in found:
        why = f"{SLOW_TO_START} delays the start of each process of Ray's by seconds, and nobody needs it: uninstall it"
        return Finding("versions", Level.MIND, f"{why}; {said}")
    return Finding("versions", Level.WELL, said)


def open_files(limit: float, most: float) -> Finding:
    """How many a process that is started now may have, and how many if it is raised before; inf for no limit."""
    if limit >= MIN_OPEN_FILES:
        return Finding("open files", Level.WELL, "no limit" if limit == inf else f"{limit}")
    how = f": `ulimit -n {MIN_OPEN_FILES}` where it is started"
    if most < MIN_OPEN_FILES:
        how = f", and {most} for who raises it: root raises that, by LimitNOFILE= or in /etc/security/limits.conf"
    return Finding("open files", Level.MIND, f"{limit}{how}")


def shared_memory(size_bytes: int) -> Finding:
    """Of /dev/shm, where Ray keeps its objects."""
    level = Level.WELL if size_bytes >= MIN_SHARED_BYTES else Level.MIND
    return Finding("/dev/shm", level, f"{size_bytes / 2**30:.1f} GiB, Ray wants 1 or more")


def disk(folder: str, free_bytes: int, total_bytes: int) -> Finding:
    """Where snapshots, keys or logs lie."""
    short = free_bytes < min(MIN_FREE_BYTES, total_bytes // 10)
    free = f"{free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"
    return Finding(f"disk of {folder}", Level.MIND if short else Level.WELL, free)


def clock(of: str, offset_s: float, uncertain_s: float) -> Finding:
    """How far another machine's clock is ahead of ours; keys and certificates expire by them."""
    off = max(0.0, abs(offset_s) - uncertain_s)
    said = f"{offset_s:+.1f} s from ours, give or take {uncertain_s:.1f}"
    return Finding(f"clock of {of}", Level.MIND if off > MAX_OFFSET_S else Level.WELL, said)


def certificate(of: str, expires: float, now: float) -> Finding:
    """When it does, in seconds since 1970."""
    days = (expires - now) / 86_400
    if days < 0:
        return Finding(f"certificate of {of}", Level.ILL, f"expired {-days:.0f} days ago")
    level = Level.MIND if expires - now < SOON_S else Level.WELL
    return Finding(f"certificate of {of}", level, f"expires in {days:.0f} days")


def readiness(of: str, status: int, body: bytes) -> Finding:
    """What was said at /readyz."""
    said = body.decode(errors="replace")[:200]
    if status != 200:
        return Finding(of, Level.ILL, said)
    with suppress(ValueError):
        if json.loads(body) == {"status": "ok"}:
            return Finding(of, Level.WELL, "is ready")
    return Finding(of, Level.ILL, f"something else has its port: {said}")  # as many a web server says 200 to everybody


def index_tier(snapshots: Mapping[str, str], shards: Mapping[str, int], n_shards: int) -> Finding:
    """Whether servers that answer make a whole: by address, the snapshot that is current there, and its shard."""
    missing = sorted(set(range(n_shards)) - set(shards.values()))
    if missing:
        return Finding("index tier", Level.ILL, f"nobody serves shard {', '.join(map(str, missing))} of {n_shards}")
    if len(set(snapshots.values())) > 1:
        held = ", ".join(f"{address} has {snapshot}" for address, snapshot in sorted(snapshots.items()))
        return Finding("index tier", Level.MIND, f"different snapshots are current: {held}")
    alone = sorted(shard for shard in set(shards.values()) if list(shards.values()).count(shard) == 1)
    said = f"{counted(n_shards, 'shard')}, {counted(len(shards), 'server')}"
    if alone:
        said += f"; one server alone has shard {', '.join(map(str, alone))}"
    return Finding("index tier", Level.WELL, said)


def worst(found: Sequence[Finding]) -> Level:
    """Of all."""
    return max((finding.level for finding in found), default=Level.WELL)
