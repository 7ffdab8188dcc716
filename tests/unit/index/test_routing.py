import numpy as np
import pytest

from openbook.errors import ShardUnavailable, SnapshotMismatch, UnknownPassage
from openbook.index.routing import Tier
from openbook.v1.index_pb2 import InfoResponse

SIZES = (0, 3, 0, 2, 0)  # of the shards of one snapshot: passages 0..4


def info(shard: int, snapshot_id: str = "s1", max_rows: int = 100) -> InfoResponse:
    return InfoResponse(
        snapshot_id=snapshot_id,
        shard=shard,
        n_shards=len(SIZES),
        n_passages=SIZES[shard],
        first_id=sum(SIZES[:shard]),
        dimension=8,
        max_k=10 + shard,
        max_rows=max_rows,
    )


def tier(max_rows: int = 100) -> Tier:
    return Tier.of({f"a{shard}": info(shard, max_rows=max_rows) for shard in range(len(SIZES))}, [])


def test_the_tier_is_what_its_servers_say_together() -> None:
    whole = tier()
    assert (whole.snapshot_id, whole.dimension, whole.n_passages, whole.max_k) == ("s1", 8, 5, 10)
    assert [shard.addresses for shard in whole.shards] == [("a0",), ("a1",), ("a2",), ("a3",), ("a4",)]


def test_ids_go_to_the_shard_that_holds_them_past_empty_ones() -> None:
    parts = tier().locate(np.array([4, 0, 2, 3, 0]))
    assert [(shard.number, positions.tolist()) for shard, positions in parts] == [(1, [1, 2, 4]), (3, [0, 3])]


def test_no_server_is_asked_for_more_than_it_takes() -> None:
    parts = tier(max_rows=2).locate(np.array([0, 1, 2, 0, 1]))
    assert [positions.tolist() for _, positions in parts] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("unknown", [-1, 5, 2**62])
def test_an_id_that_nobody_holds_is_named(unknown: int) -> None:
    with pytest.raises(UnknownPassage, match=rf"0\.\.4 in s1, got {unknown}"):
        tier().locate(np.array([0, unknown]))


def test_replicas_take_turns_and_stand_in_for_each_other() -> None:
    infos = {f"a{shard}": info(shard) for shard in range(len(SIZES))} | {"b1": info(1), "c1": info(1)}
    shard = Tier.of(infos, []).shards[1]
    assert [shard.next_two() for _ in range(4)] == [("a1", "b1"), ("b1", "c1"), ("c1", "a1"), ("a1", "b1")]
    assert Tier.of(infos, []).shards[0].next_two() == ("a0",)


def test_two_snapshots_are_both_named() -> None:
    with pytest.raises(SnapshotMismatch, match=r"old holds s1, new holds s2"):
        Tier.of({"old": info(0), "new": info(1, "s2")}, [])


def test_missing_shards_are_named_with_who_does_not_answer() -> None:
    with pytest.raises(ShardUnavailable, match=r"shard 0, 2, 4 of 5: .*a3: refused"):
        Tier.of({"a1": info(1), "b": info(3)}, ["a3: refused"])
    with pytest.raises(ShardUnavailable, match=r"no index server answers: a0: refused"):
        Tier.of({}, ["a0: refused"])
