"""Keys and quotas in a real Redis: shared by all replicas, bounded when it is gone; and nobody is let in unknown."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from redis import Redis

from openbook.cache.redis import connect
from openbook.cache.server import RedisServer
from openbook.cache.trips import PAUSE_S
from openbook.config import AccessSettings, Limits
from openbook.errors import InvalidConfig, InvalidRequest, KeysUnavailable, QuotaExceeded
from openbook.processes import end, free_port
from openbook.secret import RedisUrl
from openbook.serving.access.counters import PREFIX, Counters
from openbook.serving.access.key_redis import HASH, KeyRedis, KeyRedisBook
from openbook.serving.access.keys import Identity, KeyRecord, may_join, mint, revoked
from openbook.serving.access.ports import LOOK_S
from openbook.serving.access.quota import Policy, policies_of, priced, take
from openbook.serving.access.quotas import Quotas
from openbook.serving.access.scopes import Scope
from openbook.testing import ManualClock


def record(name: str = "web") -> KeyRecord:
    return mint(name, 0.0, [Scope.ASK])[1]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is there, and this machine busy. Where it is gone, it says so."""
    for module in ("counters", "key_redis"):
        monkeypatch.setattr(f"openbook.serving.access.{module}.TIMEOUT_S", 60.0)


@pytest.fixture
def settings(redis_server: RedisServer) -> Iterator[AccessSettings]:
    yield AccessSettings(keys="redis", url=redis_server.url)
    with Redis.from_url(redis_server.url) as redis:
        redis.delete(HASH)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


def test_what_is_added_and_revoked_all_replicas_see_within_half_a_second(settings: AccessSettings) -> None:
    async def scenario() -> None:
        book, clock = KeyRedisBook(settings), ManualClock()
        replicas = [KeyRedis(settings, clock) for _ in range(3)]
        kept = record()
        assert [await each.find(kept.digest) for each in replicas] == [None] * 3
        book.put(lambda _: kept)
        assert [await each.find(kept.digest) for each in replicas] == [kept] * 3
        book.put(lambda records: revoked(records, kept.prefix, 1.0))
        clock.advance(LOOK_S)
        for each in replicas:
            found = await each.find(kept.digest)
            assert found is not None
            assert found.why_dead(2.0) == "revoked"
            await each.aclose()

    run(scenario)


def test_of_many_who_add_keys_of_one_name_at_once_two_do(settings: AccessSettings) -> None:
    def add(_: int) -> bool:
        new = record()
        try:
            KeyRedisBook(settings).put(lambda records: may_join(records, new, 0.0))
        except InvalidRequest:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(add, range(8))) == 2
    assert len(KeyRedisBook(settings).all()) == 2


def test_without_redis_known_keys_stay_for_a_while_and_unknown_ones_are_refused() -> None:
    async def scenario() -> None:
        with RedisServer() as server:
            settings, clock = AccessSettings(keys="redis", url=server.url, known_for_s=60.0), ManualClock()
            kept = record()
            KeyRedisBook(settings).put(lambda _: kept)
            store = KeyRedis(settings, clock)
            assert await store.find(kept.digest) == kept
            gone = record()
            KeyRedisBook(settings).put(lambda _: gone)
            assert await store.find(gone.digest) == gone
            with Redis.from_url(server.url) as redis:
                redis.hdel(HASH, gone.digest)
            clock.now = LOOK_S
            assert await store.find(gone.digest) is None
            end(server.process)
            for now in (1.0, 30.0, 60.0):
                clock.now = now
                assert await store.find(kept.digest) == kept
                for unknown in (record(), gone):
                    with pytest.raises(KeysUnavailable):
                        await store.find(unknown.digest)
            clock.now = 61.0
            with pytest.raises(KeysUnavailable):
                await store.find(kept.digest)
            server.again()
            server.address()
            with pytest.raises(KeysUnavailable):
                await store.find(kept.digest)  # it is left alone for a moment
            clock.advance(PAUSE_S)
            assert await store.find(kept.digest) is None  # it began empty: what it says is believed
            await store.aclose()

    run(scenario)


def test_a_redis_that_stays_away_is_told_once_and_that_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        with RedisServer() as server:
            clock = ManualClock()
            store = KeyRedis(AccessSettings(keys="redis", url=server.url), clock)
            shared = counters(server.url, clock)

            async def ask(times: int) -> None:
                for _ in range(times):
                    with suppress(KeysUnavailable):
                        await store.find(record().digest)
                    await shared.take("web", [(Policy("questions", "day", 5), 1)])
                    clock.advance(PAUSE_S)

            end(server.process)
            await ask(3)
            server.again()
            server.address()
            await ask(2)
            for n in (3, 4):  # all are asked, whenever they come
                taken = await shared.take("web", [(Policy("questions", "day", 5), 1)])
                assert taken is not None
                assert taken.used == (n,)
                assert await store.find(record().digest) is None
            await store.aclose()
            await shared.aclose()

    run(scenario)
    assert [each.getMessage().partition(":")[0] for each in caplog.records if each.name.startswith("openbook")] == [
        "keys cannot be looked up",
        "quotas are counted by each replica alone",
        "keys can be looked up again",
        "quotas are counted by all replicas together again",
    ]


def test_a_redis_that_says_nothing_costs_who_asks_no_more_than_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
            store, shared = KeyRedis(AccessSettings(keys="redis", url=url)), counters(url)
            for module in ("counters", "key_redis"):
                monkeypatch.setattr(f"openbook.serving.access.{module}.TIMEOUT_S", 0.1)
            async with asyncio.timeout(20):  # their connections have more patience
                with pytest.raises(KeysUnavailable):
                    await store.find(record().digest)
                assert await shared.take("web", [(Policy("questions", "day", 5), 1)]) is None
            await store.aclose()
            await shared.aclose()

    run(scenario)


def test_what_is_no_key_lets_nobody_in(settings: AccessSettings) -> None:
    async def scenario() -> None:
        one, other = record("one"), record("other")
        with Redis.from_url(settings.url.get_secret_value()) as redis:  # type: ignore[union-attr]
            redis.hset(HASH, one.digest, "{}")
            redis.hset(HASH, other.digest, one.model_dump_json())  # another's
        store = KeyRedis(settings)
        assert [await store.find(each.digest) for each in (one, other)] == [None, None]
        with pytest.raises(InvalidConfig, match=f"{HASH}: holds something that is no key"):
            KeyRedisBook(settings).all()
        await store.aclose()

    run(scenario)


def test_a_redis_that_is_not_there_is_named() -> None:
    settings = AccessSettings(keys="redis", url=f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(InvalidConfig, match=r"access.url: ConnectionError"):
        KeyRedisBook(settings).all()
    with pytest.raises(InvalidConfig, match=r"access.url must be set"):
        KeyRedisBook(AccessSettings(keys="redis"))
    nobodys = KeyRedisBook(AccessSettings(keys="redis", url="redis://keys..example.org/0"))
    for asked in (nobodys.all, lambda: nobodys.put(lambda records: records[0])):
        with pytest.raises(InvalidConfig, match=r"access.url: UnicodeError: .*label empty"):
            asked()


# --- quotas


WEB = Identity("web", "", frozenset(), Limits(questions_per_minute=3, questions_per_day=5, tokens_per_day=100))


@pytest.fixture
def fresh(redis_server: RedisServer) -> str:
    with Redis.from_url(redis_server.url) as redis:
        redis.delete(*(f"{PREFIX}{name}" for name in ("web", "twin")))
    return redis_server.url


def counters(url: str, clock: ManualClock | None = None) -> Counters:
    return Counters(connect("access", RedisUrl(url), None, 60.0), clock or ManualClock())


def test_replicas_count_together_and_grant_no_more_than_the_limit(fresh: str) -> None:
    async def scenario() -> None:
        replicas = [Quotas(counters(fresh)) for _ in range(4)]
        for each in replicas:
            each.open(replace_limits(WEB, Limits(questions_per_day=20)))

        async def one(quotas: Quotas) -> bool:
            try:
                await quotas.charge("web")
            except QuotaExceeded:
                return False
            return True

        assert sum(await asyncio.gather(*(one(each) for each in replicas for _ in range(50)))) == 20
        for each in replicas:
            await each.aclose()

    run(scenario)


def test_the_script_decides_as_its_twin_in_python(fresh: str) -> None:
    async def scenario() -> None:
        shared, counts = counters(fresh), dict[str, tuple[int, int]]()
        random = Random(0)
        for _ in range(300):
            limits = Limits(
                questions_per_minute=random.choice([None, 5, 40]),
                questions_per_day=random.choice([None, 30]),
                tokens_per_minute=random.choice([None, 900]),
            )
            asked = priced(policies_of(limits), random.randrange(4), random.randrange(60))
            if not asked:
                continue
            if random.random() < 0.3:  # given back, perhaps more than was taken
                asked = [(policy, -cost) for policy, cost in asked]
            taken = await shared.take("twin", asked)
            assert taken is not None
            assert taken == take(counts, asked, taken.now)
        await shared.aclose()

    run(scenario)


def test_a_window_of_before_counts_for_nothing_and_each_hears_of_his_own(fresh: str) -> None:
    async def scenario() -> None:
        shared, minute = counters(fresh), Policy("questions", "minute", 3)
        with Redis.from_url(fresh) as redis:
            redis.hset(f"{PREFIX}web", minute.name, "0:3")
        asked = (("web", 1), ("twin", 2))
        taken = await asyncio.gather(*(shared.take(caller, [(minute, cost)]) for caller, cost in asked))
        assert [each and (each.granted, each.used) for each in taken] == [(True, (1,)), (True, (2,))]
        await shared.aclose()

    run(scenario)


def test_without_redis_a_replica_goes_on_with_what_it_knows_and_without_errors() -> None:
    async def scenario() -> None:
        with RedisServer() as server:
            clock = ManualClock()
            quotas = Quotas(counters(server.url, clock))
            quotas.open(replace_limits(WEB, Limits(questions_per_day=3)))
            await quotas.charge("web")
            end(server.process)
            for _ in range(2):
                await quotas.charge("web")
            with pytest.raises(QuotaExceeded, match="3 of 3 questions a day"):
                await quotas.charge("web")
            server.again()
            server.address()
            with pytest.raises(QuotaExceeded):
                await quotas.charge("web")  # it is left alone for a moment
            clock.advance(1.0)
            await quotas.charge("web")  # it began empty: what it says is believed
            await quotas.aclose()

    run(scenario)


def test_counts_vanish_after_the_longest_window(fresh: str) -> None:
    async def scenario() -> None:
        shared = counters(fresh)
        assert await shared.take("web", priced(policies_of(Limits(questions_per_minute=3)), 1, 0))
        await shared.aclose()
        with Redis.from_url(fresh) as redis:
            assert 86_000 < redis.ttl(f"{PREFIX}web") <= 86_400

    run(scenario)


def replace_limits(identity: Identity, limits: Limits) -> Identity:
    return replace(identity, limits=limits)
