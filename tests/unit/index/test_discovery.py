"""Lists of index servers: what they say, and what follows when they change, break and come back."""

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.config import IndexClientSettings, parse
from openbook.errors import InvalidConfig
from openbook.index.client.discovery import (
    Change,
    DnsSource,
    FileSource,
    Followed,
    Listed,
    Unreadable,
    addresses_now,
    combined,
    parse_lines,
    parse_ports,
    source_of,
)
from openbook.index.client.routing import Ask, Failure, GiveUp, Health, Probe, Router
from openbook.index.client.told import Told
from openbook.serving.nodes import RayNodes, source_on_ray
from openbook.v1.index_pb2 import HeldSnapshot, InfoResponse

READINGS = st.lists(st.none() | st.lists(st.sampled_from("abcd"), max_size=6))
"""A list each, as read; None: it could not be."""


@given(st.lists(st.sampled_from("abcd")), READINGS)
def test_those_known_are_those_of_the_last_list_that_names_any(
    first: list[str], readings: list[list[str] | None]
) -> None:
    listed = Listed(tuple(dict.fromkeys(first)))
    followed, last = set(first), list(first)
    for reading in readings:
        joined, left = listed.failed("broken") if reading is None else listed.heard(reading)
        assert not followed & set(joined), "who joins was not there"
        assert followed >= set(left), "who leaves was there"
        followed = (followed | set(joined)) - set(left)
        last = reading or last
        assert set(listed.addresses) == followed == set(last)
        assert bool(listed.problem) == (not reading)


def test_a_file_has_an_address_a_line() -> None:
    text = "# shard 0\n10.0.0.1:7000\n\n  index-1.example.org:7001  # its replica\n[fd00::1]:7000\n"
    assert parse_lines(text) == ["10.0.0.1:7000", "index-1.example.org:7001", "[fd00::1]:7000"]
    assert parse_lines("# nobody\n") == []


@pytest.mark.parametrize(
    "line", ["10.0.0.1", "10.0.0.1:", "10.0.0.1:70000", "a:0", ":7000", "a b:7000", "fd00::1:7000"]
)
def test_a_file_with_a_line_that_is_no_address_is_not_believed_at_all(line: str) -> None:
    with pytest.raises(Unreadable, match="line 2 must be host:port"):
        parse_lines(f"10.0.0.1:7000\n{line}\n")


def test_hosts_have_ports() -> None:
    assert parse_ports("index:7000-7002") == ("index", range(7000, 7003))
    assert combined({"b", "fd00::1"}, parse_ports("index:7000-7001")[1]) == [
        "b:7000",
        "b:7001",
        "[fd00::1]:7000",
        "[fd00::1]:7001",
    ]
    for wrong in ("index", "index:x", "index:7001-7000", "index:0", "index:65536", ":7000"):
        with pytest.raises(InvalidConfig, match=r"index\.discover"):
            parse_ports(wrong)


@pytest.mark.parametrize("wrong", ["consul://index:7000", "dns://index", "dns:index:7000", "file:", "dns://a/b:7000"])
def test_what_no_list_is_stops_the_start(wrong: str) -> None:
    with pytest.raises(InvalidConfig, match=r"index\.discover"):
        parse({"index": {"discover": wrong}})


def test_addresses_stand_in_one_place() -> None:
    with pytest.raises(InvalidConfig, match="must not be given together"):
        parse({"index": {"discover": "file:servers", "addresses": ["a:7000"]}})


def test_the_settings_name_a_source() -> None:
    def named(discover: str | None) -> IndexClientSettings:
        return parse({"index": {"discover": discover}}).index

    assert source_of(named(None)) is None
    assert isinstance(source_of(named("file:/etc/openbook/servers")), FileSource)
    source = source_of(named("dns://index.openbook.svc:7000"))
    assert isinstance(source, DnsSource)
    assert source.server_name == "index.openbook.svc"
    with pytest.raises(InvalidConfig, match="for an endpoint on Ray"):
        source_of(named("ray://index:7000"))
    assert source_on_ray(named("dns://index:7000")) is None
    assert isinstance(source_on_ray(named("ray://index:7000")), RayNodes)


def test_a_name_is_resolved_as_everything_here_is() -> None:
    found = asyncio.run(DnsSource("localhost", [7000]).addresses())
    assert "127.0.0.1:7000" in found


def test_every_address_of_a_name_is_a_server_and_a_resolver_that_fails_is_no_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(*addresses: str) -> None:
        def getaddrinfo(host: str, *_: object, **__: object) -> list[object]:
            assert host == "index"
            if not addresses:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    source = DnsSource("index", [7000])
    answer("10.0.0.2", "10.0.0.1")
    assert asyncio.run(source.addresses()) == ["10.0.0.1:7000", "10.0.0.2:7000"]
    answer()
    with pytest.raises(Unreadable, match="Temporary failure"):
        asyncio.run(source.addresses())
    with pytest.raises(InvalidConfig, match=r"index\.discover = 'dns://index:7000': cannot be resolved"):
        asyncio.run(addresses_now(IndexClientSettings(discover="dns://index:7000")))


def test_a_list_is_followed_whatever_reading_it_fails_with(caplog: pytest.LogCaptureFixture) -> None:
    class Odd:
        name, server_name, every_s = "file:servers", None, 0.0
        n_read = 0

        async def addresses(self) -> list[str]:
            self.n_read += 1
            if self.n_read == 2:
                raise RuntimeError("can't start new thread")
            return [f"a:{min(self.n_read, 3)}"]

    async def changes() -> list[Change]:
        found: list[Change] = []
        is_back = asyncio.Event()

        def on_change(change: Change) -> None:
            found.append(change)
            if len(found) == 2:
                is_back.set()

        followed = Followed(Odd(), Listed(()), on_change)
        await followed.begin()
        async with asyncio.timeout(10):
            await is_back.wait()
        await followed.close()
        return found

    assert asyncio.run(changes()) == [Change(("a:1",), ()), Change(("a:3",), ("a:1",))]
    assert "RuntimeError: can't start new thread; those known go on: a:1" in caplog.text


def test_nodes_of_ray_come_and_go() -> None:
    nodes = [
        {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.3", "Resources": {"index": 1.0}},
        {"Alive": False, "NodeManagerAddress": "10.0.0.4", "Resources": {"index": 1.0}},
    ]
    source = RayNodes("index", range(7000, 7002), lambda: nodes)
    assert asyncio.run(source.addresses()) == ["10.0.0.3:7000", "10.0.0.3:7001"]

    def away() -> list[dict[str, object]]:
        raise ConnectionError("no head")

    with pytest.raises(Unreadable, match="ConnectionError: no head"):
        asyncio.run(RayNodes("index", [7000], away).addresses())


def test_who_left_is_asked_no_more() -> None:
    router = Router(1.0)
    router.left("a")
    for _ in range(20):
        assert router.race("Search", "kind", ["a", "b"], 9.0).start(0.0) == [Ask("b", 1.0)]
    assert router.is_gone(["a"])
    assert router.race("Search", "kind", ["a"], 9.0).start(0.0) == [GiveUp(late=False)]
    assert router.lost("a") == router.suspect("a") == []
    router.spoke("a", 0.0)
    router.unanswered("a")
    assert router.health("a") is Health.LEFT


def test_who_leaves_during_a_call_may_answer_it_and_is_no_second_choice() -> None:
    router = Router(1.0)
    race = router.race("Search", "kind", ["a", "b"], 9.0)
    (ask,) = race.start(0.0)
    assert isinstance(ask, Ask)
    other = "b" if ask.address == "a" else "a"
    router.left(other)
    assert race.failed(ask.address, Failure.LOST, 0.1) == [Probe(ask.address), GiveUp(late=False)]

    race = router.race("Search", "kind", ["c"], 9.0)
    race.start(0.0)
    router.left("c")
    assert race.answered("c", 0.1) == []


def test_who_joins_again_begins_anew() -> None:
    router = Router(1.0)
    router.lost("a")
    router.left("a")
    router.joined("a")
    assert router.health("a") is Health.ALIVE
    assert router.lost("a") == [Probe("a")], "it is waited for anew"


def test_what_who_left_has_said_does_not_count() -> None:
    told = Told()
    held = HeldSnapshot(snapshot_id="s", sequence=1, n_shards=1)
    for address in ("a", "b"):
        told.info(address, InfoResponse(snapshot_id="s", held=[held], max_k=9, max_rows=9), 0.0)
    told.forget("a")
    tier = told.latest({"b"}, None)
    assert tier is not None
    assert tier.shards[0].addresses == ("b",)
    told.forget("b")
    assert told.latest({}, tier) is None
