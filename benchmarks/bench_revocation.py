"""How long after `openbook keys revoke` has returned its key still lets somebody in.

    python benchmarks/bench_revocation.py [--n 50] [--replicas 3]

`openbook up` of the embedded corpus with a key file, then with Redis for the keys. For each key: it is added, both
protocols ask for the models or a refused answer with it, again and again on connections of their own, so that all
replicas know it; it is revoked; the last moment at which one that was let in had been sent counts. Prints the delays,
and one JSON line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
import yaml

from openbook.cache.server import RedisServer
from openbook.client import Client
from openbook.errors import InvalidRequest, Unauthenticated
from openbook.processes import end, free_ports, start

N_CALLERS = 2  # of each protocol
BEFORE_S = 1.0
AFTER_S = 1.5
READY_S = 180.0


def openbook(*arguments: object) -> str:
    """A command that must succeed; what it prints."""
    command = [sys.executable, "-m", "openbook.cli", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def up(folder: Path, access: dict[str, object], n_replicas: int) -> Iterator[tuple[Path, int, int]]:
    """The system, its settings, and its ports of HTTP and gRPC."""
    first, config = free_ports(2), folder / "openbook.yaml"
    serving = {"http_port": first, "grpc_port": first + 1, "n_replicas": n_replicas}
    config.write_text(yaml.safe_dump({"serving": serving, "access": access}))
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "openbook.cli", "up", "--config", str(config)]
        process = start(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        give_up = time.monotonic() + READY_S
        while "ready:" not in (said := (folder / "log").read_text()):
            if time.monotonic() > give_up or process.poll() is not None:
                raise RuntimeError(said[-2000:])
            time.sleep(0.1)
        yield config, first, first + 1
    finally:
        end(process)


def over_http(port: int, key: str) -> bool:
    """Whether the key lets somebody in, on a new connection."""
    response = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers={"x-api-key": key})
    if response.status_code not in (200, 401):
        raise RuntimeError(response.text)
    return response.status_code == 200


def over_grpc(port: int, key: str) -> bool:
    """The same. A question without words is refused too, but by other means."""
    with Client(f"127.0.0.1:{port}", api_key=key, retries=False) as client:
        try:
            client.answer("")
        except InvalidRequest:
            return True
        except Unauthenticated:
            return False
    raise RuntimeError("an empty question was answered")


def delay(config: Path, asks: list[Callable[[str], bool]]) -> float:
    """Seconds from the end of the command until the last call that was let in had been sent; 0 if none was."""
    key = openbook("keys", "add", "one", "--config", config).split()
    secret = next(word for word in key if word.startswith("ob_"))
    let_in: list[float] = []
    over = threading.Event()

    def caller(ask: Callable[[str], bool]) -> None:
        while not over.is_set():
            sent = time.monotonic()
            if ask(secret):
                let_in.append(sent)

    with ThreadPoolExecutor(len(asks) * N_CALLERS) as pool:
        callers = [pool.submit(caller, ask) for ask in asks * N_CALLERS]
        try:
            time.sleep(BEFORE_S)
            openbook("keys", "revoke", secret.split("_")[1], "--config", config)
            revoked_at = time.monotonic()
            time.sleep(AFTER_S)
        finally:
            over.set()
    for each in callers:
        each.result()  # raises what ended it too early
    return max(0.0, max(let_in) - revoked_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=3)
    args = parser.parse_args()
    found = {}
    with RedisServer() as redis:
        places = {"file": {"keys": "file"}, "redis": {"keys": "redis", "url": redis.url}}
        for name, access in places.items():
            with tempfile.TemporaryDirectory() as told:
                folder = Path(told)
                if name == "file":
                    access["path"] = str(folder / "keys.jsonl")
                    openbook("keys", "add", "first", "--file", access["path"])
                with up(folder, access, args.replicas) as (config, http, grpc):
                    asks = [lambda key, port=http: over_http(port, key), lambda key, port=grpc: over_grpc(port, key)]
                    delays = [delay(config, asks) for _ in range(args.n)]
            found[name] = delays
            print(f"{name}: median {median(delays):.3f} s, longest {max(delays):.3f} s of {args.n}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
