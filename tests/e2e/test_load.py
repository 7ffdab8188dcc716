"""The callers by whom faults are judged: one that ends before it is told to makes itself heard."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from index_processes import VECTORS, Load, N, build

from openbook.core.context import Context
from openbook.core.types import Float32, Hits, Passage, RetrievalSettings
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk.snapshot import Snapshot
from openbook.testing import ExactIndex


class OnceAstray(ExactIndex):
    """Names a snapshot that nobody knows, once."""

    was_astray = False

    async def search(self, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
        hits = await super().search(queries, settings, context)
        await asyncio.sleep(0)  # for the other callers
        if self.was_astray:
            return hits
        self.was_astray = True
        return replace(hits, snapshot_id="of nobody")


def test_what_no_caller_counts_on_is_raised_though_the_others_go_on(tmp_path: Path) -> None:
    snapshot = build(tmp_path / "old")
    passages = [Passage(i, f"doc-{i}", f"title {i}", f"old {i}") for i in range(N)]
    index = OnceAstray(passages, VECTORS, Snapshot.open(snapshot).manifest.snapshot_id)
    load = Load(cast(ShardedIndex, index), snapshot)

    async def scenario() -> None:
        async with load:
            await load.more(100)

    with pytest.raises(KeyError, match="of nobody"):
        asyncio.run(scenario())
    assert load.failures == []
