"""Who holds what, and whom to ask next. Decides, does no I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from openbook.core.types import Int64
from openbook.errors import ShardUnavailable, SnapshotMismatch, UnknownPassage
from openbook.v1.index_pb2 import InfoResponse


@dataclass(frozen=True, slots=True)
class ShardServers:
    """One shard and the addresses of the servers that hold it."""

    number: int
    first_id: int
    n_passages: int
    addresses: tuple[str, ...]
    _turns: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def next_two(self) -> tuple[str, ...]:
        """Whom to ask, and whom if that one fails; each call begins with the next server. One, if there is only one."""
        turn = next(self._turns)
        return tuple(self.addresses[(turn + i) % len(self.addresses)] for i in range(min(2, len(self.addresses))))


@dataclass(frozen=True, slots=True)
class Tier:
    """All shards of one snapshot."""

    snapshot_id: str
    dimension: int
    n_passages: int
    encoder: str
    encoder_fingerprint: str
    max_k: int
    max_rows: int
    shards: tuple[ShardServers, ...]

    @classmethod
    def of(cls, infos: Mapping[str, InfoResponse], failures: Sequence[str]) -> "Tier":
        """From what each address answered, and what was heard of those that did not.

        Raises:
            ShardUnavailable: nobody holds some shard; carries the failures.
            SnapshotMismatch: the servers hold different snapshots; names an address of each.
        """
        snapshots = {info.snapshot_id: address for address, info in infos.items()}
        if len(snapshots) > 1:
            found = ", ".join(f"{address} holds {snapshot_id}" for snapshot_id, address in sorted(snapshots.items()))
            raise SnapshotMismatch(f"index servers must hold one snapshot: {found}")
        if not infos:
            raise ShardUnavailable(f"no index server answers: {'; '.join(failures)}")
        shards: dict[int, dict[str, InfoResponse]] = {}
        for address, info in infos.items():
            shards.setdefault(info.shard, {})[address] = info
        any_info = next(iter(infos.values()))
        if missing := sorted(set(range(any_info.n_shards)) - set(shards)):
            raise ShardUnavailable(
                f"no server holds shard {', '.join(map(str, missing))} of {any_info.n_shards}: "
                f"{', '.join(infos)} hold others; {'; '.join(failures) or 'no other address is known'}"
            )
        servers = [_shard_servers(number, shards[number]) for number in sorted(shards)]
        return cls(
            snapshot_id=any_info.snapshot_id,
            dimension=any_info.dimension,
            n_passages=sum(shard.n_passages for shard in servers),
            encoder=any_info.encoder,
            encoder_fingerprint=any_info.encoder_fingerprint,
            max_k=min(info.max_k for info in infos.values()),
            max_rows=min(info.max_rows for info in infos.values()),
            shards=tuple(servers),
        )

    def locate(self, ids: Int64) -> list[tuple[ShardServers, Int64]]:
        """Which positions of (n,) ids to ask of which shard, never more than `max_rows` at once.

        Raises:
            UnknownPassage: no shard holds an id.
        """
        for passage_id in ids[(ids < 0) | (ids >= self.n_passages)][:1]:
            raise UnknownPassage(f"passage id must be 0..{self.n_passages - 1} in {self.snapshot_id}, got {passage_id}")
        # Of shards that begin with the same id all but the last are empty.
        owners = np.searchsorted([shard.first_id for shard in self.shards], ids, side="right") - 1
        positions = {owner: np.flatnonzero(owners == owner) for owner in np.unique(owners).tolist()}
        return [
            (self.shards[owner], those[start : start + self.max_rows])
            for owner, those in positions.items()
            for start in range(0, len(those), self.max_rows)
        ]


def _shard_servers(number: int, infos: Mapping[str, InfoResponse]) -> ShardServers:
    info = next(iter(infos.values()))
    return ShardServers(number, info.first_id, info.n_passages, tuple(infos))
