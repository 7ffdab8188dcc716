"""Who holds what: from what the servers say, the snapshots that can be searched, and the one to search. No I/O."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from openbook.core.types import Coverage, Int64
from openbook.errors import ShardUnavailable, SnapshotMismatch, UnknownPassage
from openbook.v1.index_pb2 import HeldSnapshot, InfoResponse


@dataclass(frozen=True, slots=True)
class ShardServers:
    """One shard and the addresses of the servers that hold it."""

    number: int
    first_id: int
    n_passages: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tier:
    """One snapshot over all servers that hold a shard of it."""

    snapshot_id: str
    sequence: int  # of its publication; 0 while it is current nowhere
    dimension: int
    n_passages: int
    n_shards: int
    encoder: str
    encoder_fingerprint: str
    max_k: int
    max_rows: int
    shards: tuple[ShardServers, ...]  # those that somebody holds

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of the shards that nobody holds."""
        return tuple(sorted(set(range(self.n_shards)) - {shard.number for shard in self.shards}))

    @classmethod
    def all_of(cls, infos: Mapping[str, InfoResponse]) -> "dict[str, Tier]":
        """Every snapshot that some server holds, by id, from what each address answered."""
        holders: dict[str, dict[str, HeldSnapshot]] = {}
        for address, info in infos.items():
            for held in info.held:
                holders.setdefault(held.snapshot_id, {})[address] = held
        return {snapshot_id: cls._of(infos, held) for snapshot_id, held in holders.items()}

    @classmethod
    def _of(cls, infos: Mapping[str, InfoResponse], holders: Mapping[str, HeldSnapshot]) -> "Tier":
        shards: dict[int, list[str]] = {}
        for address in holders:
            shards.setdefault(infos[address].shard, []).append(address)
        servers = [
            ShardServers(number, holders[addresses[0]].first_id, holders[addresses[0]].n_passages, tuple(addresses))
            for number, addresses in sorted(shards.items())
        ]
        any_held = next(iter(holders.values()))
        return cls(
            snapshot_id=any_held.snapshot_id,
            sequence=max(held.sequence for held in holders.values()),
            dimension=any_held.dimension,
            n_passages=max(any_held.n_passages_total, sum(shard.n_passages for shard in servers)),
            n_shards=any_held.n_shards,
            encoder=any_held.encoder,
            encoder_fingerprint=any_held.encoder_fingerprint,
            max_k=min(infos[address].max_k for address in holders),
            max_rows=min(infos[address].max_rows for address in holders),
            shards=tuple(servers),
        )

    def coverage(self, numbers: Iterable[int]) -> Coverage:
        """What a search of these shards covers."""
        searched = set(numbers)
        return Coverage(
            n_searched=sum(shard.n_passages for shard in self.shards if shard.number in searched),
            n_total=self.n_passages,
            missing_shards=tuple(number for number in range(self.n_shards) if number not in searched),
        )

    def locate(self, ids: Int64) -> list[tuple[ShardServers, Int64]]:
        """Which positions of (n,) ids to ask of which shard, never more than `max_rows` at once.

        Raises:
            UnknownPassage: no shard holds an id.
            ShardUnavailable: nobody holds the shard of an id.
        """
        for passage_id in ids[(ids < 0) | (ids >= self.n_passages)][:1]:
            raise UnknownPassage(f"passage id must be 0..{self.n_passages - 1} in {self.snapshot_id}, got {passage_id}")
        # Of shards that begin with the same id all but the last are empty.
        owners = np.searchsorted([shard.first_id for shard in self.shards], ids, side="right") - 1
        positions = {owner: np.flatnonzero(owners == owner) for owner in np.unique(owners).tolist()}
        for owner, those in positions.items():
            end = self.shards[owner].first_id + self.shards[owner].n_passages if owner >= 0 else 0
            for passage_id in ids[those][ids[those] >= end][:1]:
                raise ShardUnavailable(f"{no_server(self)}, and passage {passage_id} is in one of those")
        return [
            (self.shards[owner], those[start : start + self.max_rows])
            for owner, those in positions.items()
            for start in range(0, len(those), self.max_rows)
        ]


def choose(tiers: Mapping[str, Tier], alive: Container[str]) -> Tier | None:
    """The snapshot to search: of those that all shards hold the one published last, even if servers are gone for now.
    Where there is none, the one of which most shards are at servers alive, and of those the one published last: servers
    that are alive hold what was published last. One that was never published is not searched.
    """
    published = [tier for tier in tiers.values() if tier.sequence]

    def rank(tier: Tier) -> tuple[bool, int, int, int, int, str]:
        within_reach = [shard for shard in tier.shards if any(address in alive for address in shard.addresses)]
        n_servers = sum(len(shard.addresses) for shard in tier.shards)
        n_shards = len(within_reach) if tier.missing else tier.n_shards
        n_passages = sum(shard.n_passages for shard in within_reach) if tier.missing else 0
        return not tier.missing, n_shards, tier.sequence, n_passages, n_servers, tier.snapshot_id

    return max(published, key=rank, default=None)


def check_complete(tier: Tier | None, infos: Mapping[str, InfoResponse], failures: Sequence[str]) -> Tier:
    """The tier, if every shard of it has a server; `infos` are those of servers alive.

    Raises:
        ShardUnavailable: nobody holds some shard; carries the failures.
        SnapshotMismatch: there are servers for every shard, and they hold different snapshots; names them.
    """
    if tier is None:
        raise ShardUnavailable(f"no index server answers: {'; '.join(failures)}")
    if not tier.missing:
        return tier
    if {info.shard for info in infos.values()} >= set(range(tier.n_shards)):
        found = ", ".join(f"{address} holds {info.snapshot_id}" for address, info in sorted(infos.items()))
        raise SnapshotMismatch(f"the servers of all shards must hold one snapshot in common: {found}")
    raise ShardUnavailable(
        f"{no_server(tier)}: {', '.join(infos)} hold others; {'; '.join(failures) or 'no other address is known'}"
    )


def no_server(tier: Tier) -> str:
    """Which shards nobody holds."""
    return f"no server holds shard {', '.join(map(str, tier.missing))} of {tier.n_shards}"
