"""What a keeper does about the nodes that it sees, and what it is told."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.errors import InvalidConfig
from openbook.serving.launch import cluster
from openbook.serving.launch.fleet import lacking

NODE = st.tuples(st.sampled_from("abcdef"), st.booleans(), st.booleans())


def as_ray_tells(node: tuple[str, bool, bool]) -> dict[str, Any]:
    name, is_alive, has_index = node
    return {"NodeID": name, "Alive": is_alive, "Resources": {"index": 1.0} if has_index else {"CPU": 1.0}}


@given(st.lists(NODE, unique_by=lambda node: node[0]), st.sets(st.sampled_from("abcdef")))
def test_after_a_look_exactly_the_living_index_nodes_are_served(
    nodes: list[tuple[str, bool, bool]], served: set[str]
) -> None:
    missing, gone = lacking(map(as_ray_tells, nodes), served)
    assert (served | set(missing)) - set(gone) == {
        name for name, is_alive, has_index in nodes if is_alive and has_index
    }
    assert not served & set(missing)
    assert served >= set(gone)


def test_the_password_follows_from_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("a secret\n")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    password = cluster.password()
    assert len(password) == 64
    assert password == cluster.password_of(token)
    assert "a secret" not in password
    token.unlink()
    with pytest.raises(InvalidConfig, match=r"Ray's token cannot be read"):
        cluster.password()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert cluster.password() == ""


@pytest.mark.parametrize(
    ("args", "needs_cache", "needs_keys"),
    [
        ({}, True, False),
        ({"cache": {"url": "redis://a"}, "access": {"keys": "redis"}}, False, True),
        ({"access": {"keys": "redis", "url": "redis://a"}}, True, False),
        ({"access": {"keys": "file"}}, True, False),
    ],
)
def test_a_redis_is_started_for_whom_nobody_has_named_one(args: Any, needs_cache: bool, needs_keys: bool) -> None:
    values = {"applications": [{"args": args}]}
    assert (cluster.needs_cache(values), cluster.needs_keys(values)) == (needs_cache, needs_keys)
