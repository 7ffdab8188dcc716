"""Keys: what they are, how long they live, and how a file of them is changed and read."""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import AccessSettings, Limits, load
from openbook.errors import InvalidConfig, InvalidRequest, KeysUnavailable
from openbook.keys import _path
from openbook.serving.access import key_file
from openbook.serving.access.key_file import KeyFile, KeyFileBook
from openbook.serving.access.keys import KeyRecord, digest_of, from_line, identity_of, may_join, mint, revoked, to_line
from openbook.serving.access.ports import LOOK_S
from openbook.serving.access.scopes import Scope
from openbook.testing import ManualClock

ASK = (Scope.ASK,)


def record(name: str = "web", now: float = 0.0, **options: float | str) -> KeyRecord:
    return mint(name, now, ASK, **options)[1]  # type: ignore[arg-type]


def test_a_key_holds_256_random_bits_and_is_kept_as_its_hash_alone() -> None:
    key, kept = mint("web", 0.0, ASK)
    other, _ = mint("web", 0.0, ASK)
    marker, prefix, secret = key.split("_")
    assert (marker, prefix, len(bytes.fromhex(secret)) * 8) == ("ob", kept.prefix, 256)
    assert key != other
    assert kept.digest == hashlib.sha256(key.encode()).hexdigest() == digest_of(key)
    assert secret not in to_line(kept)
    assert from_line(to_line(kept)) == kept


@pytest.mark.parametrize(
    "text", ["", "ob_", "ob_00000000_" + "0" * 63, "ob_00000000_" + "0" * 65, "x" * 100_000, "ob_é"]
)
def test_what_does_not_look_like_a_key_is_not_even_looked_up(text: str) -> None:
    assert digest_of(text) is None


def test_a_key_lives_until_it_expires_or_is_revoked() -> None:
    kept = record(expires=10.0)
    assert [kept.why_dead(now) for now in (0.0, 9.9, 10.0)] == ["", "", "expired"]
    gone = revoked([kept], kept.prefix, 5.0)
    assert gone.why_dead(0.0) == "revoked"
    assert revoked([gone], kept.prefix, 7.0).revoked == 5.0
    for other in ("ffff", "", kept.prefix[:4]):
        with pytest.raises(InvalidRequest, match=f"no key has the prefix '{other}'"):
            revoked([kept], other, 0.0)


def test_a_key_is_revoked_by_what_is_shown_of_it_or_by_all_of_it() -> None:
    key, kept = mint("web", 0.0, ASK)
    assert {revoked([kept], text, 1.0).revoked for text in (kept.prefix, f"ob_{kept.prefix}_", key)} == {1.0}
    secret = key.rpartition("_")[2]
    for damaged in (key.replace("_", "-"), f"ob_00000000_{secret}", f" {key}"):
        with pytest.raises(InvalidRequest, match="no key has") as told:
            revoked([kept], damaged, 1.0)
        assert secret not in str(told.value)


def test_two_keys_of_a_name_may_be_alive_at_once_and_no_third() -> None:
    first, second = record(), record()
    assert may_join([first], second, 0.0) is second
    with pytest.raises(InvalidRequest, match=f"web may have 2 keys at once, and has {first.prefix}, {second.prefix}"):
        may_join([first, second], record(), 0.0)
    for former in (revoked([first], first.prefix, 1.0), record(expires=1.0)):
        assert may_join([former, second], third := record(), 2.0) is third
    other = record(tenant="acme")
    assert may_join([first, second], other, 0.0) is other
    with pytest.raises(InvalidRequest, match="already"):  # or who revokes one of them would hit either
        may_join([first], other.model_copy(update={"prefix": first.prefix}), 0.0)


@pytest.mark.parametrize(
    ("name", "tenant", "message"), [("", "", "name = ''"), ("a b", "", "name = 'a b'"), ("a", "x:y", "tenant = 'x:y'")]
)
def test_a_name_that_would_break_a_log_or_a_cache_key_is_refused(name: str, tenant: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        mint(name, 0.0, ASK, tenant)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scopes": []}, "scopes must be some of ask, retrieve, publish, admin, got none"),
        ({"scopes": [Scope.ADMIN], "tenant": "acme"}, "a key of tenant 'acme' cannot have it"),
        ({"expires": 1.0}, "must expire later than now"),
        ({"expires": float("nan")}, "must expire later than now"),
        ({"expires": 9_999_999 * 86_400.0}, "must expire by the end of the year 9999"),
    ],
)
def test_a_key_that_would_do_for_nothing_or_too_much_is_not_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        mint("web", 1.0, **{"scopes": ASK, **options})


def test_both_keys_of_a_name_are_one_caller_and_tenants_are_told_apart() -> None:
    one, two, other = (identity_of(each, Limits()) for each in (record(), record(), record(tenant="acme")))
    assert one == two
    assert (one.caller, other.caller, other.tenant) == ("web", "acme/web", "acme")


def test_limits_that_a_key_leaves_open_are_the_default_ones() -> None:
    _, kept = mint("web", 0.0, ASK, limits=Limits(questions_per_day=5))
    default = Limits(questions_per_day=1000, tokens_per_minute=7)
    assert identity_of(kept, default).limits == Limits(questions_per_day=5, tokens_per_minute=7)


# --- in a file


def found(store: KeyFile, kept: KeyRecord) -> KeyRecord | None:
    return asyncio.run(store.find(kept.digest))


def test_a_change_of_the_file_is_seen_half_a_second_later_and_no_look_is_taken_before(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.jsonl", ManualClock()
    book = KeyFileBook(path)
    kept = book.put(lambda _: record())
    store = KeyFile(path, 60.0, clock)
    assert found(store, kept) == kept
    added = book.put(lambda records: may_join(records, record(), 0.0))
    book.put(lambda records: revoked(records, kept.prefix, 1.0))
    assert (found(store, kept), found(store, added)) == (kept, None)
    clock.advance(LOOK_S)
    now_kept, now_added = found(store, kept), found(store, added)
    assert now_kept is not None
    assert (now_kept.why_dead(2.0), now_added) == ("revoked", added)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_key_that_is_revoked_while_the_file_is_read_is_dead_at_the_next_look(
    is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock, read = tmp_path / "keys.jsonl", ManualClock(), key_file._read
    book = KeyFileBook(path)
    kept = book.put(lambda _: record())

    def read_before(path: Path) -> dict[str, KeyRecord]:
        known = read(path)
        monkeypatch.setattr(key_file, "_read", read)
        book.put(lambda records: revoked(records, kept.prefix, 1.0))
        return known

    store = None if is_first else KeyFile(path, 60.0, clock)
    book.put(lambda _: record("other"))
    monkeypatch.setattr(key_file, "_read", read_before)
    store = store or KeyFile(path, 60.0, clock)
    for _ in range(2):
        clock.advance(LOOK_S)
        now_kept = found(store, kept)
    assert now_kept is not None
    assert now_kept.why_dead(2.0) == "revoked"


def test_without_its_file_known_keys_stay_for_a_while_and_unknown_ones_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys.jsonl", ManualClock()
    kept = KeyFileBook(path).put(lambda _: record())
    store = KeyFile(path, 60.0, clock)
    clock.advance(1000)
    assert found(store, kept) == kept
    path.rename(tmp_path / "elsewhere")
    clock.advance(59)
    assert found(store, kept) == kept
    with pytest.raises(KeysUnavailable):
        found(store, record())
    clock.advance(2)
    with pytest.raises(KeysUnavailable):
        found(store, kept)
    assert caplog.text.count("cannot be read") == 1, "it looks twice a second"
    (tmp_path / "elsewhere").rename(path)
    clock.advance(1)
    assert found(store, kept) == kept
    assert found(store, record()) is None


def test_a_change_that_could_not_be_read_is_read_with_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "keys.jsonl", ManualClock()
    book = KeyFileBook(path)
    kept = book.put(lambda _: record())
    store = KeyFile(path, 60.0, clock)
    book.put(lambda records: revoked(records, kept.prefix, 1.0))

    def fails(path: Path) -> dict[str, KeyRecord]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(key_file, "_read", fails)
        clock.advance(LOOK_S)
        assert found(store, kept) == kept
    clock.advance(LOOK_S)
    assert found(store, kept) != kept


def test_while_one_changes_the_file_no_other_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.jsonl"
    monkeypatch.setattr(key_file, "LOCK_TIMEOUT_S", 0.0)

    def decide(_: Sequence[KeyRecord]) -> KeyRecord:
        with pytest.raises(InvalidConfig, match="another process is at work"):
            KeyFileBook(path).put(lambda _: record("other"))  # or it would be lost with what we write
        return record()

    KeyFileBook(path).put(decide)


def test_a_line_that_is_no_key_lets_nobody_in_and_hinders_no_other(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    kept, damaged = record(), record("other")
    path.write_text(f'{to_line(damaged)[:-5]}\n\n{to_line(kept)}\n{{"scopes": ["root"]}}\n')
    store = KeyFile(path, 60.0)
    assert (found(store, kept), found(store, damaged)) == (kept, None)
    with pytest.raises(InvalidConfig, match="line 1 is no key"):
        KeyFileBook(path).all()  # who would change it would lose that line


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"access.path = .*none.jsonl': cannot be read.* `openbook keys add`"):
        KeyFile(tmp_path / "none.jsonl", 60.0)
    assert KeyFileBook(tmp_path / "none.jsonl").all() == []


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root would /dev/null, for all of the machine."""
    pipe, round_and_round = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    round_and_round.symlink_to(round_and_round)
    monkeypatch.setattr(key_file, "_read", lambda *_, **__: {})  # it would wait for who writes
    for path, why in ((pipe, "must be a regular file"), (round_and_round, "cannot be written: ")):
        with pytest.raises(InvalidConfig, match=f"^{path}: {why}"):
            KeyFileBook(path).put(lambda _: record())
    assert pipe.is_fifo()


def test_a_file_in_ones_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    kept = KeyFileBook(Path("~/keys.jsonl")).put(lambda _: record())
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert found(KeyFile(Path("~/keys.jsonl"), 60.0), kept) == kept


def test_the_home_of_nobody_is_a_folder_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~who-is-nobody").mkdir()
    kept = KeyFileBook(Path("~who-is-nobody/keys")).put(lambda _: record())
    assert found(KeyFile(Path("~who-is-nobody/keys"), 60.0), kept) == kept
    assert _path(AccessSettings(keys="file", path=Path("~who-is-nobody/keys"))) == tmp_path / "~who-is-nobody/keys"


def test_where_keys_are_kept_must_be_said_whole() -> None:
    with pytest.raises(ValueError, match="path must name the file"):
        AccessSettings(keys="file")


# --- commands


def run(*words: str) -> tuple[str, str]:
    done = CliRunner().invoke(app, ["keys", *words], catch_exceptions=False)
    return done.stdout, done.stderr


def test_a_key_is_printed_once_listed_by_its_prefix_and_revoked_by_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    file = ("--file", str(path))
    limits = {"questions_per_minute": 1, "questions_per_day": 2, "tokens_per_minute": 3, "tokens_per_day": 9}
    options = [word for name, limit in limits.items() for word in (f"--{name.replace('_', '-')}", str(limit))]
    out, _ = run("add", "web", *file, "--scope", "ask", "--tenant", "acme", "--days", "30", *options)
    key = out.strip()
    (kept,) = KeyFileBook(path).all()
    assert kept.digest == digest_of(key)
    assert (kept.tenant, kept.scopes, kept.limits) == ("acme", (Scope.ASK,), Limits(**limits))
    assert kept.expires == kept.created + 30 * 86400
    assert key.split("_")[2] not in path.read_text()
    listed, _ = run("list", *file)
    assert {f"ob_{kept.prefix}_", "acme/web", "ask", "alive"} <= set(listed.split())
    assert key.split("_")[2] not in listed
    assert run("revoke", kept.prefix, *file)[0] == f"ob_{kept.prefix}_... of acme/web: revoked\n"
    assert "revoked" in run("list", *file)[0].split()


def test_keys_that_outlive_the_calendar_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    KeyFileBook(path).put(lambda _: record().model_copy(update={"expires": 1e12}))
    KeyFileBook(path).put(lambda _: record(expires=1.0))
    listed = run("list", "--file", str(path))[0]
    assert "after 9999" in listed
    assert "expired" in listed.split(), "by now"


def test_a_file_that_the_endpoint_may_read_stays_so_when_a_key_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    kept = KeyFileBook(path).put(lambda _: record())
    path.chmod(0o644)
    former_umask = os.umask(0o077)
    try:
        run("revoke", kept.prefix, "--file", str(path))
    finally:
        os.umask(former_umask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_key_revoked_through_a_link_is_dead_for_who_reads_the_file_itself(tmp_path: Path) -> None:
    file = tmp_path / "disk" / "keys.jsonl"
    file.parent.mkdir()
    kept = KeyFileBook(file).put(lambda _: record())
    link = tmp_path / "keys.jsonl"
    link.symlink_to(file)
    run("revoke", kept.prefix, "--file", str(link))
    (now_kept,) = KeyFileBook(file).all()
    assert now_kept.why_dead(0.0) == "revoked"
    assert list(tmp_path.glob(".*")) == [], "who writes the file itself waits for the same lock"


def test_who_does_not_say_where_keys_are_kept_hears_how(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"access.keys must say where .* --file"):
        run("list")
    settings = tmp_path / "openbook.yaml"
    settings.write_text(f"access: {{keys: file, path: {tmp_path / 'keys.jsonl'}}}")
    key = run("add", "web", "--config", str(settings))[0].strip()
    assert [each.digest for each in KeyFileBook(tmp_path / "keys.jsonl").all()] == [digest_of(key)]
    run("revoke", key, "--config", str(settings))
    assert "revoked" in run("list", "--config", str(settings))[0].split()
    kept = tmp_path / "keys.jsonl"
    settings.write_text(f"access: {{keys: redis, url: 'redis://127.0.0.1:1', path: {kept}}}")
    assert _path(load(settings).access) is None, "they are in no file"
