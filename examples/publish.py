"""Make a snapshot current at running index servers, and say what they hold.

    python examples/publish.py root/2026-11-02 127.0.0.1:7000 127.0.0.1:7001

The servers serve a root: docs/publish.md. Killed at any moment, run it again.
"""

import argparse
import asyncio
from pathlib import Path

from openbook.config import IndexClientSettings, section
from openbook.errors import OpenbookError
from openbook.index.client.publish import held_by_servers, publish


async def main(snapshot: Path, addresses: tuple[str, ...]) -> None:
    settings = section(IndexClientSettings, "publish.py", addresses=addresses)
    sequence = await publish(snapshot, settings)
    print(f"{snapshot}: publication {sequence}")
    for held in await held_by_servers(settings):
        print(f"  {held.where}: {held.state} {held.snapshot_id[:12]}, {held.n_passages} passages")


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("snapshot", type=Path)
parser.add_argument("addresses", nargs="+", help="host:port of every index server")
options = parser.parse_args()
try:
    asyncio.run(main(options.snapshot, tuple(options.addresses)))
except OpenbookError as error:
    raise SystemExit(f"{type(error).__name__}: {error}") from None
