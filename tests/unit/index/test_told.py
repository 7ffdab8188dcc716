from test_tier import info

from openbook.index.client.tier import Tier
from openbook.index.client.told import Told

SIZES = (3, 2)


def says(told: Told, address: str, *held: tuple[str, int], at: float) -> None:
    """A server of shard a or b, which its address begins with, says what it holds, the current one first."""
    told.info(address, info("ab".index(address[0]), *held, sizes=SIZES), at)


def latest(told: Told, searched: Tier | None = None, alive: str = "a1 a2 b1 b2") -> tuple[str, int, tuple[int, ...]]:
    found = told.latest(alive.split(), searched)
    return (found.snapshot_id, found.sequence, found.missing) if found else ("", 0, ())


def of_all(*held: tuple[str, int]) -> tuple[Told, Tier]:
    """Four servers that hold the same, and what is searched then."""
    told = Told()
    for address in ("a1", "a2", "b1", "b2"):
        says(told, address, *held, at=0.0)
    told.all_asked_at = 0.0
    tier = told.latest(["a1", "a2", "b1", "b2"], None)
    assert tier is not None
    assert told.is_known(tier)
    return told, tier


def test_a_reply_that_names_what_is_known_is_no_news() -> None:
    told, tier = of_all(("old", 1))
    assert not told.reply("a1", 1, 1.0)
    assert told.is_known(tier)


def test_news_hold_until_the_newest_is_found_whole() -> None:
    told, old = of_all(("old", 1))
    assert told.reply("a1", 2, 1.0)
    assert not told.reply("a1", 2, 1.5)  # once
    assert latest(told, old) == ("old", 1, ())
    assert not told.is_known(old)
    says(told, "b1", ("old", 1), ("new", 0), at=2.0)  # prepared there, as yet
    assert latest(told, old)[0] == "old"
    says(told, "a1", ("new", 2), ("old", 1), at=2.0)
    assert latest(told, old) == ("new", 2, ())
    new = told.latest([], old)
    assert new is not None
    assert told.is_known(new)  # whatever a2 and b2 say, who are still silent
    assert not told.is_known(old)


def test_news_that_lead_nowhere_are_followed_up_once() -> None:
    told, old = of_all(("old", 1))
    assert told.reply("a1", 2, 1.0)
    says(told, "a1", ("new", 2), ("old", 1), at=2.0)
    says(told, "b1", ("old", 1), at=2.0)
    assert not told.is_known(old)  # b2 may have it
    says(told, "b2", ("old", 1), at=2.0)
    told.all_asked_at = 2.0
    assert latest(told, old) == ("old", 1, ())
    assert told.is_known(old)
    assert not told.reply("a1", 2, 3.0)
    assert told.reply("b1", 2, 4.0)  # it has heard of it by now


def test_what_a_silent_server_said_before_the_news_does_not_make_a_former_snapshot_whole() -> None:
    told, old = of_all(("old", 1))
    assert told.reply("b1", 2, 1.0)
    for address in ("b1", "b2"):
        says(told, address, ("new", 2), ("old", 1), at=2.0)
    told.all_asked_at = 2.0
    assert latest(told, old, alive="b1 b2") == ("new", 2, (0,))


def test_nobody_goes_back_for_want_of_answers() -> None:
    told, new = of_all(("new", 2), ("old", 1))
    says(told, "b2", ("old", 1), at=1.0)
    assert told.reply("a1", 3, 2.0)
    for address in ("a1", "a2"):
        says(told, address, ("newer", 3), ("new", 2), ("old", 1), at=3.0)
    says(told, "b2", ("old", 1), at=3.0)  # and b1 is silent
    told.all_asked_at = 3.0
    assert latest(told, new) == ("new", 2, ())
    says(told, "b1", ("old", 1), at=4.0)  # it has lost it
    assert latest(told, new) == ("old", 1, ())


def test_a_tier_begun_anew_counts_from_one_again() -> None:
    told, searched = of_all(("new", 7))
    for address in ("a1", "a2", "b1", "b2"):
        says(told, address, ("other", 1), at=1.0)
    told.all_asked_at = 1.0
    assert latest(told, searched) == ("other", 1, ())
    other = told.latest([], searched)
    assert other is not None
    assert told.is_known(other)
    assert told.reply("a1", 2, 2.0)
    assert not told.is_known(other)


def test_a_rollback_of_which_one_server_tells() -> None:
    told, old = of_all(("old", 1))
    says(told, "a2", ("new", 2), ("old", 1), at=1.0)  # as it comes back; it has missed the third
    assert not told.is_known(old)
    for address in ("a1", "b1", "b2"):
        says(told, address, ("old", 3), ("new", 2), at=2.0)
    told.all_asked_at = 2.0
    assert latest(told, old) == ("old", 3, ())


def test_a_server_that_has_heard_of_the_latest_is_not_outdated() -> None:
    told = Told()
    says(told, "b1", ("new", 2), at=2.0)
    says(told, "a1", ("new", 2), at=1.0)  # asked before, and slower
    assert latest(told) == ("new", 2, ())


def test_an_answer_that_was_overtaken_is_forgotten() -> None:
    told, _ = of_all(("old", 1))
    says(told, "a1", ("new", 2), ("old", 1), at=2.0)
    says(told, "a1", ("old", 1), at=1.0)
    assert told.infos["a1"].snapshot_id == "new"
