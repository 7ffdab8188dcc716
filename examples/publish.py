"""Make a snapshot current at running index servers, and say what they hold.

    python examples/publish.py root/2026-11-02 127.0.0.1:7000 127.0.0.1:7001

The servers serve a root: docs/publish.md. Killed at any moment, run it again.
"""

import asyncio
import sys
from pathlib import Path

from openbook.config import IndexClientSettings
from openbook.errors import OpenbookError
from openbook.index.client.publish import held_by_servers, publish


async def main(snapshot: Path, addresses: tuple[str, ...]) -> None:
    settings = IndexClientSettings(addresses=addresses)
    sequence = await publish(snapshot, settings)
    print(f"{snapshot}: publication {sequence}")
    for held in await held_by_servers(settings):
        print(f"  {held.where}: {held.state} {held.snapshot_id[:12]}, {held.n_passages} passages")


try:
    asyncio.run(main(Path(sys.argv[1]), tuple(sys.argv[2:])))
except OpenbookError as error:
    raise SystemExit(f"{type(error).__name__}: {error}") from None
