import numpy as np
import pytest

from openbook.core.types import Coverage
from openbook.errors import ShardUnavailable, SnapshotMismatch, UnknownPassage
from openbook.index.client.tier import Tier, check_complete, choose
from openbook.v1.index_pb2 import HeldSnapshot, InfoResponse

SIZES = (0, 3, 0, 2, 0)  # of the shards of one snapshot: passages 0..4


def info(shard: int, *snapshots: tuple[str, int], max_rows: int = 100, sizes: tuple[int, ...] = SIZES) -> InfoResponse:
    """A server of this shard that holds snapshots of these ids and sequences, the current one first."""
    held = [
        HeldSnapshot(
            snapshot_id=snapshot_id,
            sequence=sequence,
            n_shards=len(sizes),
            n_passages=sizes[shard],
            first_id=sum(sizes[:shard]),
            dimension=8,
            n_passages_total=sum(sizes),
        )
        for snapshot_id, sequence in snapshots or (("s1", 1),)
    ]
    current = held[0].snapshot_id
    return InfoResponse(snapshot_id=current, shard=shard, max_k=10 + shard, max_rows=max_rows, held=held)


def tier(max_rows: int = 100) -> Tier:
    return Tier.all_of({f"a{shard}": info(shard, max_rows=max_rows) for shard in range(len(SIZES))})["s1"]


def chosen(infos: dict[str, InfoResponse], *dead: str) -> str:
    found = choose(Tier.all_of(infos), [address for address in infos if address not in dead])
    return found.snapshot_id if found else "none"


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


@pytest.mark.parametrize("missing", [1, 3])
def test_an_id_of_a_shard_that_nobody_holds(missing: int) -> None:
    half = Tier.all_of({f"a{shard}": info(shard) for shard in range(len(SIZES)) if shard != missing})["s1"]
    with pytest.raises(ShardUnavailable, match=rf"shard {missing} of 5, and passage {0 if missing == 1 else 3}"):
        half.locate(np.arange(5))
    assert half.coverage(shard.number for shard in half.shards) == Coverage(5 - SIZES[missing], 5, (missing,))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([("old", 1)], [("old", 1)], "old"),
        ([("old", 1), ("new", 0)], [("old", 1), ("new", 0)], "old"),  # prepared everywhere, published nowhere
        ([("new", 2), ("old", 1)], [("old", 1), ("new", 0)], "new"),  # published at one, prepared at the other
        ([("new", 2), ("old", 1)], [("old", 1)], "old"),  # the other never had it
        ([("new", 2), ("old", 1)], [("new", 2), ("old", 1)], "new"),
        ([("old", 3), ("new", 2)], [("new", 2), ("old", 1)], "old"),  # rolled back
    ],
)
def test_searched_is_what_was_published_last_of_what_all_shards_hold(
    a: list[tuple[str, int]], b: list[tuple[str, int]], expected: str
) -> None:
    infos = {"a": info(0, *a, sizes=(3, 2)), "b": info(1, *b, sizes=(3, 2))}
    assert chosen(infos) == chosen(infos, "b") == expected


def test_where_no_snapshot_is_whole_the_most_within_reach_counts() -> None:
    infos = {"a": info(0, ("old", 1), sizes=(3, 2)), "b": info(1, ("new", 1), sizes=(3, 2))}
    assert chosen(infos) == "old"
    assert chosen(infos, "a") == "new"
    assert chosen({}) == "none"


def test_what_was_never_published_is_not_searched_even_if_nothing_else_is_whole() -> None:
    a, b = info(0, ("old", 1), ("new", 0), sizes=(3, 2)), info(1, ("other", 1), ("new", 0), sizes=(3, 2))
    assert chosen({"a": a, "b": b}) == "old"


def test_replicas_that_hold_another_snapshot_are_left_out() -> None:
    infos = {f"a{shard}": info(shard) for shard in range(len(SIZES))}
    tiers = Tier.all_of({**infos, "b1": info(1, ("s2", 2)), "c1": info(1, ("s2", 2), ("s1", 1))})
    assert tiers["s1"].shards[1].addresses == ("a1", "c1")
    assert tiers["s2"].missing == (0, 2, 3, 4)


def test_two_snapshots_are_both_named() -> None:
    infos = {"old": info(0, sizes=(3, 2)), "new": info(1, ("s2", 1), sizes=(3, 2))}
    with pytest.raises(SnapshotMismatch, match=r"new holds s2, old holds s1"):
        check_complete(choose(Tier.all_of(infos), infos), infos, [])


def test_missing_shards_are_named_with_who_does_not_answer() -> None:
    infos = {"a1": info(1), "b": info(3)}
    with pytest.raises(ShardUnavailable, match=r"shard 0, 2, 4 of 5: .*a3: refused"):
        check_complete(choose(Tier.all_of(infos), infos), infos, ["a3: refused"])
    with pytest.raises(ShardUnavailable, match=r"no index server answers: a0: refused"):
        check_complete(None, {}, ["a0: refused"])
