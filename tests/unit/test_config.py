from pathlib import Path

import pytest

from openbook import config
from openbook.core.types import Formulation
from openbook.errors import InvalidConfig


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "openbook.yaml"
    path.write_text("answer: {k: 7, formulation: token}\nindex: {addresses: ['a:1', 'b:2']}\n")
    settings = config.load(path, {"OPENBOOK_ANSWER__K": "9", "PATH": "/bin"})
    assert settings.answer.k == 9
    assert settings.answer.formulation is Formulation.TOKEN
    assert settings.index.addresses == ("a:1", "b:2")
    assert config.load(None, {}) == config.Settings()


@pytest.mark.parametrize(
    ("text", "env", "message"),
    [
        ("answer: {k: 0}", {}, r"openbook\.yaml: answer\.k = 0: .*greater than or equal to 1"),
        ("answer: {kk: 5}", {}, r"openbook\.yaml: answer\.kk = 5: .*not permitted"),
        ("answers: {k: 5}", {}, r"openbook\.yaml: answers = .*not permitted"),
        ("", {"OPENBOOK_CACHE__TTL_S": "soon"}, r"OPENBOOK_CACHE__TTL_S: cache\.ttl_s = 'soon': .*integer"),
        ("", {"OPENBOOK_SERVING__HTTP_PORT": "70000"}, r"serving\.http_port = 70000: .*65535"),
        ("", {"OPENBOOK_INDEX__TIMEOUT_S": ".nan"}, r"index\.timeout_s = nan: .*finite"),
        ("", {"OPENBOOK_CACHE__URL": "{"}, r"OPENBOOK_CACHE__URL: '{' cannot be read as YAML"),
        ("", {"OPENBOOK_SERVING__GRPC_PORT": "0"}, r"serving\.grpc_port = 0: .*greater than or equal to 1"),
        ("answer: {k: 500}", {}, r"k must be at most max_k = 100, got 500"),
        ("answer: {length_penalty: .nan}", {}, r"length_penalty must be -10\.0\.\.10\.0, got nan"),
        ("- a\n- b", {}, r"openbook\.yaml: must map sections"),
        ("answer: {k: ", {}, r"openbook\.yaml: cannot be read as YAML"),
    ],
)
def test_a_bad_value_is_named_with_its_source(tmp_path: Path, text: str, env: dict[str, str], message: str) -> None:
    path = tmp_path / "openbook.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=message):
        config.load(path, env)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"none\.yaml: cannot be read"):
        config.load(tmp_path / "none.yaml", {})


def test_an_index_server_takes_options_then_environment_then_file(tmp_path: Path) -> None:
    path = tmp_path / "openbook.yaml"
    path.write_text("answer: {k: 7}\nindex_server: {snapshot: s, shard: 1, max_k: 10, n_threads: 3}\n")
    env = {"OPENBOOK_INDEX_SERVER__SHARD": "2", "OPENBOOK_INDEX_SERVER__ADMIN_TOKEN": "1234567890123456"}
    settings = config.load_index_server(path, env, n_threads=4, host=None)
    assert (settings.snapshot, settings.shard, settings.max_k, settings.n_threads) == (Path("s"), 2, 10, 4)
    assert settings.host == "127.0.0.1"
    assert settings.admin_token is not None
    assert settings.admin_token.get_secret_value() == "1234567890123456"
    assert config.load(path, env).answer.k == 7  # the other processes read the same file


@pytest.mark.parametrize("token", ["short", "{short: "])
def test_a_bad_token_is_named_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidConfig, match="OPENBOOK_INDEX_SERVER__ADMIN_TOKEN") as caught:
        config.load_index_server(None, {"OPENBOOK_INDEX_SERVER__ADMIN_TOKEN": token}, snapshot="s")
    assert "short" not in str(caught.value)


def test_a_bad_option_of_an_index_server_is_named() -> None:
    with pytest.raises(InvalidConfig, match="openbook index serve: shard = -1"):
        config.load_index_server(None, {"OPENBOOK_INDEX_SERVER__SHARD": "1"}, snapshot="s", shard=-1)
