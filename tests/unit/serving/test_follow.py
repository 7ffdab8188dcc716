"""A running system follows its settings file: what it takes up, what it refuses, and what it goes back to."""

import os
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

import pytest
from ray.exceptions import RayError

from openbook.config import Settings, load, parse
from openbook.errors import InvalidConfig, InvalidModel, StartupError
from openbook.serving.launch import local, run

RUNNING = parse({"index": {"addresses": ["i:1"]}, "cache": {"url": "redis://r:1/0"}})


class Stopped(Exception):
    """What ends `follow` in place of Ctrl-C."""


def followed(
    path: Path, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object], seen: local.FileState = None
) -> list[Settings]:
    """What was deployed while the file changed step by step, before each look at it."""
    deployed: list[Settings] = []
    left = list(steps)

    def update(settings: Settings, timeout_s: float = inf, is_wanted: Callable[[], bool] = lambda: True) -> None:
        deployed.append(settings)
        assert timeout_s == local.UPDATE_TIMEOUT_S + settings.index.wait_s, "nobody looks at the file meanwhile"
        if settings.generator.model == "away":
            raise RayError("the controller does not answer")
        if settings.generator.model == "missing":
            raise InvalidModel("there is no such model")
        if settings.generator.model == "huge":
            assert is_wanted()
            left.pop(0)()
            assert not is_wanted()
            raise StartupError("no room")

    def sleep(seconds: float) -> None:
        if not left:
            raise Stopped
        left.pop(0)()

    monkeypatch.setattr(run, "update", update)
    monkeypatch.setattr(local.time, "sleep", sleep)
    with pytest.raises(Stopped):
        local.follow(path, RUNNING, seen or local.state_of(path))
    return deployed


def test_what_the_file_says_comes_into_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("{}")
    deployed = followed(
        path,
        monkeypatch,
        lambda: None,
        lambda: path.write_text("serving: {n_replicas: 2}"),
        lambda: path.write_text("serving:  {n_replicas: 2}"),  # says the same
        lambda: path.write_text("answer: {k: 7}"),
        lambda: path.write_text("answer: {k: 8}"),  # and is as long
    )
    assert [(each.serving.n_replicas, each.answer.k) for each in deployed] == [(2, 5), (0, 7), (0, 8)]
    assert all(each.index == RUNNING.index and each.cache == RUNNING.cache for each in deployed)


def test_our_own_come_back_when_the_file_names_no_others_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("{}")
    theirs = ("index: {addresses: ['o:1', 'o:2']}", "index: {discover: 'dns://o:1'}", "cache: {url: 'redis://o:1/0'}")
    steps = [partial(path.write_text, text) for each in theirs for text in (each, "{}")]
    deployed = followed(path, monkeypatch, *steps)
    assert deployed[1::2] == [RUNNING] * 3
    assert [each == RUNNING for each in deployed[::2]] == [False] * 3


def test_what_changed_while_the_system_started_comes_into_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("{}")
    loaded = local.state_of(path)
    path.write_text("{answer: {k: 7}, index: {wait_s: 9}}")
    (deployed,) = followed(path, monkeypatch, lambda: None, seen=loaded)
    assert (deployed.answer.k, deployed.index.wait_s) == (7, 9)


def test_another_file_of_the_same_size_and_time_is_a_change(tmp_path: Path) -> None:
    """As of those who give every file one time, and every change a folder of its own."""
    path, other = tmp_path / "settings.yaml", tmp_path / "other.yaml"
    for each, k in ((path, 5), (other, 7)):
        each.write_text(f"answer: {{k: {k}}}")
        os.utime(each, (1, 1))
    seen = local.state_of(path)
    other.replace(path)
    assert local.state_of(path) != seen


@pytest.mark.parametrize("model", ["missing", "away"])
def test_what_cannot_be_is_left_and_the_next_change_is_taken(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("{}")
    deployed = followed(
        path,
        monkeypatch,
        lambda: path.write_text("answer: {k: seven}"),
        lambda: path.write_text(f"generator: {{model: {model}}}"),
        path.unlink,
        lambda: path.write_text("answer: {k: 7}"),
    )
    assert [(each.generator.model, each.answer.k) for each in deployed] == [
        (model, 5),
        ("embedded", 5),  # what ran before
        ("embedded", 7),
    ]


def test_what_finds_no_room_is_left_once_the_file_says_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("{}")
    deployed = followed(
        path,
        monkeypatch,
        lambda: path.write_text("generator: {model: huge}"),
        lambda: path.write_text("answer: {k: 7}"),  # while that waits
        lambda: None,
    )
    assert [(each.generator.model, each.answer.k) for each in deployed] == [
        ("huge", 5),
        ("embedded", 5),  # what ran before
        ("embedded", 7),
    ]


def test_an_update_goes_on_as_long_as_the_file_asks_for_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("answer: {k: 7}")
    wanted = local.updated(RUNNING, load(path))
    for text, says_still in (
        ("answer:  {k: 7}", True),
        ("answer: {k:", True),
        ("answer: {k: 8}", False),
        ("{}", False),
    ):
        path.write_text(text)
        assert local._says_still(path, RUNNING, wanted) == says_still


@pytest.mark.parametrize("setting", ["host: 127.0.0.2", "http_port: 1234", "grpc_port: 1234", "proxy: python"])
def test_what_proxies_are_started_with_cannot_change(setting: str) -> None:
    key, value = setting.split(": ")
    wanted = parse({"serving": {key: int(value) if value.isdecimal() else value}})
    with pytest.raises(InvalidConfig, match=rf"serving\.{key} cannot change from \S+ to {value} while"):
        local.updated(RUNNING, wanted)


def test_nor_can_tls() -> None:
    with pytest.raises(InvalidConfig, match=r"serving\.tls cannot change from None to "):
        local.updated(RUNNING, parse({"serving": {"tls": {"certificate": "c.pem", "key": "k.pem"}}}))


def test_what_others_reach_says_who_may_ask_from_the_start_and_as_long_as_it_runs() -> None:
    open_to_all = {"serving": {"host": "0.0.0.0"}, "access": {"allow_anonymous": True}}
    running, silent = parse(open_to_all), parse({**open_to_all, "access": {}})
    with pytest.raises(InvalidConfig, match=r"access\.allow_anonymous"), local.local_system(None, silent):
        pass
    with pytest.raises(InvalidConfig, match=r"access\.allow_anonymous"):
        local.updated(running, silent)
    assert local.updated(running, running) == running
