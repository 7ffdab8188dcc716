"""The cache against a real redis-server: same bits back, and no failure of Redis ever reaches the caller."""

import asyncio
import os
import signal
import socketserver
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import trustme
from certificates import by_intermediate, plain, strict_as_since_3_13, tls_files
from pydantic import SecretStr
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from openbook import processes
from openbook.cache import redis as redis_cache
from openbook.cache import server as cache_server
from openbook.cache.codec import EmbeddingCodec, GenerationCodec
from openbook.cache.redis import RedisCache, connect, open_answers, open_embeddings, warn_if_useless
from openbook.cache.server import RedisServer
from openbook.cache.trips import PAUSE_S
from openbook.config import CacheSettings, ClientTls, ServerTls
from openbook.core.types import Generation, Token
from openbook.errors import InvalidConfig, StartupError
from openbook.secret import RedisUrl
from openbook.telemetry import CACHE_ERRORS, CACHE_UP
from openbook.testing import ManualClock

EMBEDDINGS = EmbeddingCodec()
KEY_PREFIX = EMBEDDINGS.prefix
EMBEDDING = np.random.default_rng(0).standard_normal(384).astype(np.float32)
LOG_P = np.array([-0.1, -2.4, -np.inf])
TOKENS = tuple(Token("e", -0.1 / 3, tuple((LOG_P / n).tolist()), n, n) for n in (3, 7))
GENERATION = Generation("Erdős", (7, 102), -0.1, LOG_P, LOG_P / 3, TOKENS)


def errors(operation: str) -> float:
    return CACHE_ERRORS.labels(operation)._value.get()


def freeze(server: RedisServer) -> None:
    """Stop it, and wait until it stands still."""
    os.kill(server.process.pid, signal.SIGSTOP)
    os.waitpid(server.process.pid, os.WUNTRACED)


def settings(server: RedisServer, **changes: object) -> CacheSettings:
    return CacheSettings(url=server.url, timeout_s=60.0).model_copy(update=changes)


def test_the_same_bits_come_back_in_the_order_of_the_keys(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        cache = RedisCache(settings(redis_server), EMBEDDINGS)
        await cache.put_many([("one", EMBEDDING), ("two", -EMBEDDING)])
        two, nothing, one = await cache.get_many(["two", "never seen", "one"])
        assert nothing is None
        assert one is not None
        assert one.tobytes() == EMBEDDING.tobytes()
        assert two is not None
        assert two.tobytes() == (-EMBEDDING).tobytes()
        await cache.aclose()

    asyncio.run(scenario())


def test_a_redis_in_which_nothing_can_be_looked_up_is_told(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with Redis(port=redis_server.port) as client:
        for user, right in (("blind", "+ping"), ("few", "+mget")):
            client.execute_command("ACL", "SETUSER", user, "on", ">rights", "~openbook:*", right)
    for at in ("few:rights@127.0.0.1", "blind:rights@127.0.0.1", "no..name"):
        warn_if_useless(CacheSettings(url=RedisUrl(f"redis://{at}:{redis_server.port}/0")))
    blind, nobody = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "mget" in blind
    assert "no..name" in nobody
    assert "rights" not in caplog.text


def test_entries_expire(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        cache = RedisCache(settings(redis_server, ttl_s=1234), EMBEDDINGS)
        await cache.put_many([("expiring", EMBEDDING)])
        await cache.aclose()

    asyncio.run(scenario())
    with Redis(port=redis_server.port) as client:
        assert 1200 < client.ttl(KEY_PREFIX + "expiring") <= 1234


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: v[:-1],
        lambda v: v[:-4],
        lambda v: bytes([v[0] ^ 1]) + v[1:],
        lambda v: v[:-1] + bytes([v[-1] ^ 1]),
        lambda v: b"",
    ],
)
def test_an_altered_value_is_a_miss(redis_server: RedisServer, damage: Callable[[bytes], bytes]) -> None:
    async def scenario() -> None:
        cache = RedisCache(settings(redis_server), EMBEDDINGS)
        await cache.put_many([("altered", EMBEDDING)])
        with Redis(port=redis_server.port) as client:
            client.set(KEY_PREFIX + "altered", damage(client.get(KEY_PREFIX + "altered")))
        before = errors("digest")
        assert await cache.get_many(["altered"]) == [None]
        assert errors("digest") == before + 1
        await cache.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e20])
def test_an_embedding_that_no_encoder_makes_is_a_miss(redis_server: RedisServer, value: float) -> None:
    """Whoever put it there knows the format; a search with it would be refused, and the one who asked be blamed."""

    async def scenario() -> None:
        cache = RedisCache(settings(redis_server), EMBEDDINGS)
        await cache.put_many([("poisoned", np.full_like(EMBEDDING, value))])
        assert await cache.get_many(["poisoned"]) == [None]
        await cache.aclose()

    asyncio.run(scenario())


def test_an_embedding_belongs_to_one_key_and_to_those_who_know_the_secret(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        mine, theirs, open_to_all = (
            RedisCache(settings(redis_server).model_copy(update={"secret": secret and SecretStr(secret)}), EMBEDDINGS)
            for secret in ("one of some length", "another of some length", None)
        )
        await mine.put_many([("one", EMBEDDING), ("another", EMBEDDING + 1)])
        with Redis(port=redis_server.port) as client:
            client.set(KEY_PREFIX + "one", client.get(KEY_PREFIX + "another"))
        assert await mine.get_many(["one"]) == [None]
        for cache, believed in ((mine, True), (theirs, False), (open_to_all, False)):
            (found,) = await cache.get_many(["another"])
            assert (found is not None) == believed
            await cache.aclose()

    asyncio.run(scenario())


def test_a_second_process_finds_what_the_first_left_in_redis(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        first, second = open_embeddings(settings(redis_server)), open_embeddings(settings(redis_server))
        await first.put_many([("shared", EMBEDDING)])
        with Redis(port=redis_server.port) as client:
            (found,) = await second.get_many(["shared"])
            assert found is not None
            assert found.tobytes() == EMBEDDING.tobytes()
            client.delete(KEY_PREFIX + "shared")
        (again,) = await second.get_many(["shared"])
        assert again is not None, "what came from Redis is kept in process"
        await first.aclose()
        await second.aclose()

    asyncio.run(scenario())


def test_a_stopped_server_is_a_miss_and_a_metric_and_it_is_found_again() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        with RedisServer() as server:
            cache = RedisCache(settings(server), EMBEDDINGS, clock)
            await cache.put_many([("before", EMBEDDING)])
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
            read_errors, write_errors = errors("read"), errors("write")
            assert await cache.get_many(["before"]) == [None]
            assert errors("read") == read_errors + 1
            assert await cache.get_many(["before"]) == [None]
            assert errors("read") == read_errors + 1, "Redis is left alone for a moment"
            clock.advance(PAUSE_S)
            await cache.put_many([("before", EMBEDDING)])
            assert errors("write") == write_errors + 1
            await cache.aclose()

    asyncio.run(scenario())


def test_a_server_that_stays_away_is_told_once_and_that_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        with RedisServer() as server:
            cache = RedisCache(settings(server), EMBEDDINGS, clock)

            async def ask(times: int) -> None:
                for _ in range(times):
                    await cache.get_many(["any"])
                    clock.advance(PAUSE_S)
                    await cache.put_many([("any", EMBEDDING)])
                    clock.advance(PAUSE_S)

            processes.end(server.process)
            await ask(3)
            server.again()
            server.address()
            await ask(2)
            await cache.aclose()

    asyncio.run(scenario())
    told = [each.getMessage().partition(":")[0] for each in caplog.records if each.name == redis_cache.__name__]
    assert told == ["cache read fails", "cache write fails", "cache read works again", "cache write works again"]


def test_a_frozen_server_costs_one_timeout_and_serves_again_when_it_thaws() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        with RedisServer() as server:
            cache = RedisCache(settings(server), EMBEDDINGS, clock)
            await cache.put_many([("before", EMBEDDING)])
            impatient = RedisCache(settings(server, timeout_s=0.05), EMBEDDINGS, clock)
            freeze(server)
            try:
                before = errors("read")
                assert await impatient.get_many(["before"]) == [None]
                assert errors("read") == before + 1
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            (found,) = await cache.get_many(["before"])
            assert found is not None
            await cache.aclose()
            await impatient.aclose()

    asyncio.run(scenario())


def test_who_comes_while_a_round_trip_is_under_way_shares_the_next(redis_server: RedisServer) -> None:
    def n_reads(client: Redis) -> int:
        return int(client.info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"])

    async def scenario() -> None:
        cache = RedisCache(settings(redis_server), EMBEDDINGS)
        await cache.put_many([(f"popular {i}", EMBEDDING + i) for i in range(50)])
        with Redis(port=redis_server.port) as client:
            before = n_reads(client)
            answers = await asyncio.gather(*(cache.get_many([f"popular {i}", "never seen"]) for i in range(50)))
            assert n_reads(client) <= before + 2
        for i, (found, nothing) in enumerate(answers):
            assert nothing is None
            assert found is not None
            assert found.tobytes() == (EMBEDDING + i).tobytes()
        await cache.aclose()

    asyncio.run(scenario())


def test_after_a_pause_one_round_trip_tries_for_all() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        with RedisServer() as server:
            cache = RedisCache(settings(server, timeout_s=0.05), EMBEDDINGS, clock)
            freeze(server)
            before = errors("read") + errors("write")
            try:
                for n_tries in (1, 2):
                    await asyncio.gather(*(cache.get_many(["any"]) for _ in range(20)))
                    await cache.put_many([("any", EMBEDDING)])
                    assert errors("read") + errors("write") == before + n_tries, "one for all, reads and writes"
                    clock.advance(PAUSE_S)
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            await cache.aclose()

    asyncio.run(scenario())


def test_what_is_full_and_refuses_writes_is_read() -> None:
    async def scenario() -> None:
        with RedisServer() as server, Redis(port=server.port) as client:
            clock = ManualClock()
            cache = RedisCache(settings(server), EMBEDDINGS, clock)
            await cache.put_many([("there", EMBEDDING)])
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1")
            cache._breaker.failed()
            clock.advance(PAUSE_S)  # so that a write tries for all
            before = errors("write")
            for _ in range(3):
                await cache.put_many([("more", EMBEDDING)])
                (found,) = await cache.get_many(["there"])
                assert found is not None
                assert CACHE_UP.labels(EMBEDDINGS.tier)._value.get() == 0
            assert errors("write") == before + 1, "and writes are paused"
            client.config_set("maxmemory", "0")
            clock.advance(PAUSE_S)
            await cache.put_many([("more", EMBEDDING)])
            assert (await cache.get_many(["more"]))[0] is not None
            assert CACHE_UP.labels(EMBEDDINGS.tier)._value.get() == 1
            await cache.aclose()

    asyncio.run(scenario())


def test_what_may_be_written_and_not_read_does_not_count_as_up() -> None:
    async def scenario() -> None:
        with RedisServer() as server, Redis(port=server.port) as client:
            client.execute_command("ACL", "SETUSER", "openbook", "on", ">secret", "~openbook:*", "+set")
            url, clock = RedisUrl(f"redis://openbook:secret@127.0.0.1:{server.port}/0"), ManualClock()
            cache, up = RedisCache(settings(server, url=url), EMBEDDINGS, clock), CACHE_UP.labels(EMBEDDINGS.tier)
            before = errors("read")
            assert await cache.get_many(["mine"]) == [None]
            clock.advance(PAUSE_S)  # so that a write tries for all
            await cache.put_many([("mine", EMBEDDING)])
            assert client.exists(KEY_PREFIX + "mine")
            assert (errors("read"), up._value.get()) == (before + 1, 0)
            client.execute_command("ACL", "SETUSER", "openbook", "+mget")
            assert (await cache.get_many(["mine"]))[0] is not None
            assert up._value.get() == 1
            await cache.aclose()

    asyncio.run(scenario())


def test_a_user_with_few_rights_is_enough(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        with Redis(port=redis_server.port) as client:
            client.execute_command("ACL", "SETUSER", "openbook", "on", ">se:cret/1", "~openbook:*", "+mget", "+set")
        try:
            place = f"127.0.0.1:{redis_server.port}/0"
            allowed = RedisCache(
                CacheSettings(url=f"redis://openbook:se%3Acret%2F1@{place}", timeout_s=60.0), EMBEDDINGS
            )
            await allowed.put_many([("mine", EMBEDDING)])
            (found,) = await allowed.get_many(["mine"])
            assert found is not None
            assert found.tobytes() == EMBEDDING.tobytes()
            refused = RedisCache(CacheSettings(url=f"redis://openbook:wrong@{place}", timeout_s=60.0), EMBEDDINGS)
            before = errors("read")
            for _ in range(3):
                assert await refused.get_many(["mine"]) == [None]
            assert errors("read") == before + 1, "and Redis is left alone"
            await allowed.aclose()
            await refused.aclose()
        finally:
            with Redis(port=redis_server.port) as client:
                client.execute_command("ACL", "DELUSER", "openbook")

    asyncio.run(scenario())


def test_float16_is_near_at_half_the_size_and_has_keys_of_its_own(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        exact, half = (
            RedisCache(settings(redis_server), EMBEDDINGS),
            RedisCache(settings(redis_server), EmbeddingCodec("float16")),
        )
        await half.put_many([("half", EMBEDDING), ("too large", EMBEDDING * 1e6)])
        found, nothing = await half.get_many(["half", "too large"])
        assert nothing is None, "infinite in float16"
        assert found is not None
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, EMBEDDING, atol=2e-3)
        assert await exact.get_many(["half"]) == [None]
        with Redis(port=redis_server.port) as client:
            value = client.get(EmbeddingCodec("float16").prefix + "half")
            assert len(value) == 16 + 2 * 384
            client.set(KEY_PREFIX + "half", value)
        assert await exact.get_many(["half"]) == [None], "the digest is of the whole key"
        await exact.aclose()
        await half.aclose()

    asyncio.run(scenario())


def test_answers_come_back_as_they_were_and_damaged_ones_do_not(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        first, second = (open_answers(settings(redis_server, answers=10)) for _ in range(2))
        assert first is not None
        assert second is not None
        await first.put_many([("answer", GENERATION), ("damaged", GENERATION)])
        with Redis(port=redis_server.port) as client:
            key = GenerationCodec.prefix + "damaged"
            client.set(key, client.get(key)[:-1])
        found, nothing = await second.get_many(["answer", "damaged"])
        assert nothing is None
        assert found is not None
        assert (found.text, found.token_ids, found.log_likelihood, found.tokens) == ("Erdős", (7, 102), -0.1, TOKENS)
        for name in ("log_prior", "log_posterior"):
            assert getattr(found, name).tobytes() == getattr(GENERATION, name).tobytes()
        await first.aclose()
        await second.aclose()
        assert open_answers(settings(redis_server)) is None

    asyncio.run(scenario())


@asynccontextmanager
async def encrypted(server: RedisServer, tls: ServerTls) -> AsyncIterator[int]:
    """The port of what decrypts in front of a server: not every redis-server was built with TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as front:
        yield front.sockets[0].getsockname()[1]


def test_through_tls_and_only_to_whom_the_ca_knows(
    redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "another").mkdir()
    ours, _ = tls_files(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    trusted = ClientTls(ca=Path("~/ca.pem"))
    _, others = tls_files(tmp_path / "another")

    async def scenario() -> None:
        async with encrypted(redis_server, ours) as port:
            url = f"rediss://127.0.0.1:{port}/0"
            cache = RedisCache(CacheSettings(url=url, tls=trusted, timeout_s=60.0), EMBEDDINGS)
            await cache.put_many([("through tls", EMBEDDING)])
            (found,) = await cache.get_many(["through tls"])
            assert found is not None
            assert found.tobytes() == EMBEDDING.tobytes()
            stranger = RedisCache(CacheSettings(url=url, tls=others, timeout_s=60.0), EMBEDDINGS)
            before = errors("read")
            assert await stranger.get_many(["through tls"]) == [None]
            assert errors("read") == before + 1
            await cache.aclose()
            await stranger.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("issued", [plain, by_intermediate])
def test_a_certificate_of_redis_that_grpc_would_take_is_taken_with_any_python(
    redis_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    issued: Callable[[Path], trustme.LeafCert],
) -> None:
    leaf, ours = issued(tmp_path), ServerTls(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    leaf.cert_chain_pems[0].write_to_path(ours.certificate)
    leaf.private_key_pem.write_to_path(ours.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))  # whom this machine trusts
    strict_as_since_3_13(monkeypatch)

    async def scenario() -> None:
        async with encrypted(redis_server, ours) as port:
            for tls in (ClientTls(ca=tmp_path / "ca.pem"), None):
                async with connect("cache", RedisUrl(f"rediss://127.0.0.1:{port}/0"), tls, 60.0) as client:
                    assert await client.get("nothing") is None

    asyncio.run(scenario())


def test_tls_that_cannot_be_is_refused_at_the_start(tmp_path: Path) -> None:
    _, tls = tls_files(tmp_path)
    with pytest.raises(InvalidConfig, match=r"cache\.tls is for a cache\.url of rediss://"):
        RedisCache(CacheSettings(url="redis://nowhere", tls=tls), EMBEDDINGS)
    gone = ClientTls(ca=tmp_path / "gone.pem")
    with pytest.raises(InvalidConfig, match=r"cache\.tls: .*: cannot be read: No such file"):
        RedisCache(CacheSettings(url="rediss://nowhere", tls=gone), EMBEDDINGS)


def configured(client: Redis, *names: str) -> dict[str, str]:
    return {name: client.config_get(name)[name] for name in names}


OF_A_CACHE = {"bind": "127.0.0.1", "appendonly": "no", "save": "", "maxmemory-policy": "allkeys-lru"}


def test_a_cache_is_this_machines_alone_keeps_nothing_on_disk_and_makes_room(redis_server: RedisServer) -> None:
    with Redis(port=redis_server.port, decode_responses=True) as client:
        found = configured(client, *OF_A_CACHE, "maxmemory", "protected-mode")
    assert found == OF_A_CACHE | {"maxmemory": str(256 << 20), "protected-mode": "yes"}


def test_who_is_asked_from_elsewhere_answers_there() -> None:
    with RedisServer(host="0.0.0.0") as server, Redis(port=server.port, decode_responses=True) as client:
        assert configured(client, "bind", "protected-mode") == {"bind": "0.0.0.0", "protected-mode": "no"}


def test_what_is_kept_is_kept_at_once_and_for_those_who_know_the_password(tmp_path: Path) -> None:
    folder = tmp_path / "not yet" / "keys"
    with RedisServer(password="of-both", keeps_in=folder) as server:
        assert server.answers(60.0)
        assert "of-both" not in " ".join(server.process.args), "everybody of this machine reads it"  # type: ignore[arg-type]
        (secret,) = server.folder.glob("*.conf")
        assert secret.stat().st_mode & 0o777 == 0o600
        with Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        with Redis(port=server.port, password="of-both", decode_responses=True) as client:
            found = configured(client, "dir", "appendonly", "appendfsync", "maxmemory-policy", "maxmemory")
        always = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "maxmemory": "0"}
        assert found == {"dir": str(folder), **always}


def test_a_frozen_server_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.1)
    server = RedisServer()
    freeze(server)
    server.stop()
    assert server.process.returncode == -signal.SIGKILL


def test_one_that_froze_while_it_started_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.1)
    with RedisServer() as server:
        freeze(server)
        with monkeypatch.context() as hasty:
            hasty.setattr(cache_server, "START_TIMEOUT_S", 0.1)
            with pytest.raises(StartupError, match="does not start"):
                server.address()
        server.again()
        assert server.address() == server.url
        assert server.process.poll() is None


@contextmanager
def answering(server: socketserver.BaseServer) -> Iterator[None]:
    """In a thread of its own."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


def test_one_that_reads_what_it_kept_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    n_told = 0

    class Loading(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            nonlocal n_told
            while line := self.rfile.readline():
                _, name, *_ = (self.rfile.readline().strip() for _ in range(2 * int(line[1:])))
                n_told += 1
                loaded = b"%1\r\n$5\r\nproto\r\n:3" if name == b"HELLO" else b"+PONG"
                self.wfile.write((b"-LOADING it is loading" if n_told < 40 else loaded) + b"\r\n")

    with RedisServer() as server, socketserver.ThreadingTCPServer(("127.0.0.1", 0), Loading) as loading:
        monkeypatch.setattr(server, "port", loading.server_address[1])
        with answering(loading):
            assert server.answers(10.0)
            assert n_told < 40
            assert server.address() == server.url
            assert n_told >= 40


def test_a_url_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"cache\.url = 'http://nowhere': no URL of a Redis server"):
        RedisCache(CacheSettings(url="http://nowhere"), EMBEDDINGS)
    with pytest.raises(InvalidConfig, match=r"cache\.url = '\*\*\*': no URL of a Redis server") as refused:
        RedisCache(CacheSettings(url="redis://openbook:sec/ret@nowhere:x/0"), EMBEDDINGS)
    assert "sec" not in str(refused.value)
