"""Whose turn it is among those who wait, so that whoever asks for much takes no time from whoever asks for little."""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from operator import itemgetter
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


@dataclass(slots=True)
class _Account(Generic[Item]):
    """Of one caller."""

    given: float  # the sizes of what it was given
    size: int = 0  # of all that waits
    waiting: dict[Item, int] = field(default_factory=dict)  # sizes, the oldest first


class Turns(Generic[Item]):
    """What waits, handed out by fair queueing (Demers, Keshav and Shenker, 1989). Pure: no lock, no clock.

    Next is what would leave its caller with the least in its account; what one caller asked for keeps its order. Who
    comes back begins where an equal share of those who wait has got to, and not before the least of them (as in
    start-time fair queueing; Goyal, Vin and Cheng, 1996): so it neither saves up turns nor waits until all others have
    had one.

    Args:
        max_size: of all that waits.
    """

    def __init__(self, max_size: float = math.inf) -> None:
        self._max_size = max_size
        self._accounts: dict[Hashable, _Account[Item]] = {}  # of those who wait, or have had more than their share
        self._account_of: dict[Item, _Account[Item]] = {}
        self._begun: set[Item] = set()  # given in part
        self._share = 0.0
        self.size = 0
        self.n_callers = 0
        """Who wait."""

    def __len__(self) -> int:
        return len(self._account_of)

    def __contains__(self, item: Item) -> bool:
        return item in self._account_of

    def waiting(self, caller: Hashable) -> int:
        """The size of all that waits of one caller."""
        account = self._accounts.get(caller)
        return account.size if account else 0

    def put(self, caller: Hashable, item: Item, size: int) -> list[Item]:
        """Let it wait, and return what must no longer, for want of place: the newest of who has most waiting. That may
        be this very item. Where nothing waits there is place for any size.
        """
        account = self._accounts.get(caller)
        if account is None or self._is_settled(account):
            self._accounts.pop(caller, None)  # behind those who have had as much, as if he were forgotten already
            account = self._accounts[caller] = _Account(self._share)
        elif account.waiting:  # he keeps the turn of his oldest, and has no claim to more
            claim = max(0.0, self._share - next(iter(account.waiting.values())) - account.given)
            # The share is what they have had on average, and rises with his part of it, and that by which it rises.
            rises = claim / (self.n_callers - 1) if self.n_callers > 1 else 0.0
            account.given += claim + rises
            self._share += rises
        self.n_callers += not account.waiting
        account.waiting[item] = size
        account.size += size
        self._account_of[item] = account
        self.size += size
        refused = self._excess(item) if self.size > self._max_size and len(self) > 1 else []
        for each in refused:
            self.remove(each)
        return refused

    def in_order(self, at_once: float = math.inf) -> Iterator[Item]:
        """All that waits by whose turn it is, if of nothing more than `at_once` is given at a time."""
        if len(self._account_of) == 1:
            return iter(list(self._account_of))
        accounts = (_in_order(account, at_once) for account in self._accounts.values())
        return map(itemgetter(1), merge(*accounts, key=itemgetter(0)))

    def give(self, item: Item, size: int | None = None, times: float = 1.0) -> None:
        """All of it, or so much, waits no longer, for it is its turn. It counts for so many times its size."""
        account = self._account_of[item]
        n_waiting = account.waiting[item]
        size = n_waiting if size is None else size
        self._settle()
        account.given += size * times
        self._share += size * times / self.n_callers
        if size == n_waiting:
            self.remove(item)
        else:
            account.waiting[item] -= size
            account.size -= size
            self.size -= size
            self._begun.add(item)
        # What nobody else could use is no debt: else who has long been alone would wait as long for a newcomer.
        least = min((each.given for each in self._accounts.values() if each.waiting), default=self._share)
        self._share = max(self._share, least)

    def _settle(self) -> None:
        """Those who wait have claims on one another, and none on whoever comes later and begins at the share."""
        waiting = [each for each in self._accounts.values() if each.waiting]
        behind = self._share - sum(each.given for each in waiting) / len(waiting)
        for each in waiting if behind > 0 else ():
            each.given += behind

    def pass_by(self, caller: Hashable, n_items: int, size: float) -> None:
        """What comes while nobody else waits is given at once: as if it had been put, and then given one by one. Of so
        many together this is the size, times what it counts for.
        """
        account = self._accounts.get(caller)
        if account is not None:
            if n_items > 1:
                self._share = max(self._share, account.given)  # as long as something of his waits: see `give`
            account.given += size
        self._share += size
        if account is not None:
            self._forget()

    def remove(self, item: Item) -> None:
        """It waits no longer."""
        account = self._account_of.pop(item)
        size = account.waiting.pop(item)
        account.size -= size
        self.size -= size
        self._begun.discard(item)
        if account.waiting:
            return
        self.n_callers -= 1
        self._forget()

    def _forget(self) -> None:
        for caller in [caller for caller, each in self._accounts.items() if self._is_settled(each)]:
            del self._accounts[caller]

    def _is_settled(self, account: _Account[Item]) -> bool:
        """Whether nothing waits, and nothing was had above the share: whoever comes back begins as a newcomer does."""
        return account.given <= self._share and not account.waiting

    def _excess(self, newcomer: Item) -> list[Item]:
        accounts = list(self._accounts.values())
        sizes = [account.size for account in accounts]
        gone = set(self._begun)
        refused = []
        while sum(sizes) > self._max_size:
            most = max(range(len(accounts)), key=sizes.__getitem__)
            item = next((each for each in reversed(accounts[most].waiting) if each not in gone), newcomer)
            if item is newcomer:
                return [newcomer]
            gone.add(item)
            refused.append(item)
            sizes[most] -= accounts[most].waiting[item]
        return refused


def _in_order(account: _Account[Item], at_once: float) -> Iterator[tuple[float, Item]]:
    given = account.given
    for item, size in account.waiting.items():
        given += min(size, at_once)
        yield given, item
