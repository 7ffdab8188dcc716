"""What the servers have said, and what follows from it: which snapshot to search, and whether to ask first. No I/O.

A reply to a search names the sequence of its server's latest publication. One that is higher than that of the snapshot
searched is news: what all servers said before is outdated then, as far as choosing goes, until they were asked anew. So
whoever asks after a publication is answered from what was published. A sequence is news from each server once: where
asking has shown that the newer one cannot be searched, since no server of some shard has it, the older one is searched
without asking again.
"""

from collections.abc import Container
from math import inf

from openbook.index.client.tier import Tier, choose
from openbook.v1.index_pb2 import InfoResponse


class Told:
    """What each server said last, and when it was asked."""

    def __init__(self) -> None:
        self.infos: dict[str, InfoResponse] = {}
        self.tiers: dict[str, Tier] = {}
        """All that somebody holds, as far as was ever said."""
        self.outdated_before = -inf
        """What was asked for before then says nothing about what is current."""
        self.all_asked_at = -inf
        """Since then every server was asked and has answered, or will not."""
        self._asked_at: dict[str, float] = {}
        self._named: dict[str, int] = {}  # the latest publication that each server has named
        self._newest = 0

    def info(self, address: str, info: InfoResponse, asked_at: float) -> None:
        """A server said what it holds, and was asked then."""
        if asked_at < self._asked_at.get(address, -inf):
            return  # overtaken by what was asked later
        self.infos[address], self._asked_at[address] = info, asked_at
        self.tiers = Tier.all_of(self.infos)
        self._named[address] = current = _sequence(info)
        if current > self._newest:
            self._newest, self.outdated_before = current, asked_at

    def forget(self, address: str) -> None:
        """A server is listed no more: what it said does not count any more."""
        for known in (self.infos, self._asked_at, self._named):
            known.pop(address, None)
        self.tiers = Tier.all_of(self.infos)

    def reply(self, address: str, sequence: int, now: float) -> bool:
        """A server has named its latest publication in a reply; whether that is news."""
        if sequence <= self._named.get(address, 0):
            return False
        self._named[address] = sequence
        self._newest, self.outdated_before = max(sequence, self._newest), now
        return True

    def is_known(self, tier: Tier) -> bool:
        """Whether this is what to search, for all we were told: nobody has named a later publication since all were
        asked, or this is the latest that was named, and whole.
        """
        is_newest = tier.sequence >= self._newest and not tier.missing
        return self.all_asked_at > -inf and (self.all_asked_at >= self.outdated_before or is_newest)

    def latest(self, alive: Container[str], searched: Tier | None) -> Tier | None:
        """The snapshot to search, which may lack shards; see `choose`. A silent server may hold whatever is newest:
        what it said before counts only for `searched`, from which nobody goes back to an older one unless the servers
        of a shard say that they do not have it any more.
        """
        tier = choose(Tier.all_of(self.recent()), alive)
        if searched is None or (tier is not None and tier.sequence >= searched.sequence):
            return tier
        same = self.tiers.get(searched.snapshot_id)
        return tier if same is None or same.missing else same

    def recent(self) -> dict[str, InfoResponse]:
        """What was said since the latest publication that was named."""
        return {
            address: info
            for address, info in self.infos.items()
            if self._asked_at[address] >= self.outdated_before or _sequence(info) >= self._newest
        }


def _sequence(info: InfoResponse) -> int:
    """Of the publication that is current at a server."""
    return next((held.sequence for held in info.held if held.snapshot_id == info.snapshot_id), 0)
