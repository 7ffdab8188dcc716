from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import format_exception
from typing import Any, get_args

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner

from openbook import config
from openbook.cli import app
from openbook.core.types import Formulation
from openbook.errors import InvalidConfig, OpenbookError
from openbook.evaluation.settings import EvaluationSettings
from openbook.training.settings import TrainingSettings


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "openbook.yaml"
    path.write_text("answer: {k: 7, formulation: token}\nindex: {addresses: ['a:1', 'b:2']}\n")
    settings = config.load(path, {"OPENBOOK_ANSWER__K": "9", "PATH": "/bin"})
    assert settings.answer.k == 9
    assert settings.answer.formulation is Formulation.TOKEN
    assert settings.index.addresses == ("a:1", "b:2")
    assert config.load(None, {}) == config.Settings()


@pytest.mark.parametrize(
    "text",
    [
        "encoder: {num_gpus: 0.5}\ngenerator: {num_gpus: 0.5}",
        "encoder: {num_gpus: 1}\ngenerator: {num_gpus: 2}",
        "encoder: {num_gpus: 0.5}\ngenerator: {num_gpus: 1}\nserving: {topology: split}",
    ],
)
def test_replicas_may_have_what_ray_gives_of_gpus(text: str, tmp_path: Path) -> None:
    (tmp_path / "openbook.yaml").write_text(text)
    config.load(tmp_path / "openbook.yaml", {})


@pytest.mark.parametrize(
    ("text", "env", "message"),
    [
        ("answer: {k: 0}", {}, r"openbook\.yaml: answer\.k = 0: .*greater than or equal to 1"),
        ("answer: {kk: 5}", {}, r"openbook\.yaml: answer\.kk: no such key$"),
        ("answers: {k: 5}", {}, r"openbook\.yaml: answers: no such key$"),
        ("index_server: {shrad: 1}", {}, r"openbook\.yaml: index_server\.shrad: no such key$"),
        ("", {"OPENBOOK_INDEX_SERVER__PORT": "70000"}, r"SERVER__PORT: index_server\.port = 70000: .*65535"),
        ("index_server: {max_k: 65536}", {}, r"index_server\.max_k = 65536: .*65535"),
        ("index_server: {max_rows: 131068}", {}, r"index_server\.max_rows = 131068: .*131067"),
        ("index_server: {n_threads: 10000}", {}, r"index_server\.n_threads = 10000: .*equal to 1024"),
        ("index_server: {max_streams: 100000}", {}, r"index_server\.max_streams = 100000: .*equal to 10000"),
        ("generator: {n_threads: 3000000000}", {}, r"generator\.n_threads = 3000000000: .*equal to 1024"),
        ("serving: {num_cpus: .inf}", {}, r"serving\.num_cpus = inf: .*finite"),
        ("encoder: {num_cpus: .inf}", {}, r"encoder\.num_cpus = inf: .*finite"),
        ("index_server: {port: 7000, frame_port: 7000}", {}, r"port and frame_port must differ, got 7000"),
        ("index_server: {port: 7000, metrics_port: 7000}", {}, r"port and metrics_port must differ, got 7000"),
        ("answer: {1: 5}", {}, r"openbook\.yaml: answer: Keys should be strings"),
        ("", {"OPENBOOK_CACHE__TTL_S": "soon"}, r"OPENBOOK_CACHE__TTL_S: cache\.ttl_s = 'soon': .*integer"),
        ("", {"OPENBOOK_SERVING__HTTP_PORT": "70000"}, r"serving\.http_port = 70000: .*65535"),
        ("", {"OPENBOOK_INDEX__TIMEOUT_S": ".nan"}, r"index\.timeout_s = nan: .*finite"),
        ("", {"OPENBOOK_CACHE__URL": "{"}, r"OPENBOOK_CACHE__URL: cannot be read as YAML: line 1, column 2"),
        ("", {"OPENBOOK_CACHE__URL": "2026-11-31"}, r"OPENBOOK_CACHE__URL: cannot be read as YAML$"),
        (
            "",
            {"OPENBOOK_SERVING__HTTP_PORT": "9000"},
            r"HTTP_PORT: .*http_port and grpc_port .* 9000 twice",
        ),
        ("", {"OPENBOOK_SERVING__GRPC_PORT": "0"}, r"serving\.grpc_port = 0: .*greater than or equal to 1"),
        ("", {"OPENBOOK_INDEX__TIMEOUT_S": "8.0e+9"}, r"index\.timeout_s = 8000000000\.0: .*equal to 1000000"),
        ("answer: {max_timeout_s: 2147454}", {}, r"answer\.max_timeout_s = 2147454: .*equal to 1000000"),
        ("answer: {k: 500}", {}, r"k must be at most max_k = 100, got 500"),
        ("answer: {length_penalty: .nan}", {}, r"length_penalty must be -10\.0\.\.10\.0, got nan"),
        ("answer: {max_work: 2000}", {}, r"answer: .*at most max_work = 2000, got 5 x \(300 \+ 4 x 32\) = 2140"),
        ("serving: {max_work_in_flight: 9}", {}, r"max_work must be at most .*max_work_in_flight = 9, got 100000"),
        ("encoder: {max_queue: 19}", {}, r"encoder\.max_queue must be at least answer\.max_passages = 20, got 19"),
        ("encoder: {max_queue: 63}", {}, r"encoder\.max_queue must be at least serving\.max_entries = 64, got 63"),
        ("generator: {num_gpus: 1.5}", {}, r"generator\.num_gpus = 1\.5: .*a whole number"),
        (
            "encoder: {num_gpus: 0.5}\ngenerator: {num_gpus: 1}",
            {},
            r"encoder\.num_gpus \+ generator\.num_gpus, .* `fused`: .* a whole number, got 1\.5",
        ),
        ("index: {wait_s: 1}", {"OPENBOOK_ANSWR__K": "9"}, r"^environment variable OPENBOOK_ANSWR__K: answr: no such"),
        ("answr: {k: 9}", {"OPENBOOK_ANSWR__K": "9"}, r"yaml, environment variable OPENBOOK_ANSWR__K: answr: "),
        ("index: {wait_s: 1}", {"OPENBOOK_ANSWER__K": "200"}, r"^environment variable OPENBOOK_ANSWER__K: .*max_k"),
        ("answer: {n_beams: 2}", {"OPENBOOK_ANSWER__K": "200"}, r"yaml, environment variable OPENBOOK_ANSWER__K: .*k"),
        ("answer: {k: 200}", {"OPENBOOK_INDEX__WAIT_S": "1"}, r"openbook\.yaml: answer: .*k must be at most max_k"),
        ("", {"OPENBOOK_ENCODER__MAX_QUEUE": "19"}, r"^environment variable OPENBOOK_ENCODER__MAX_QUEUE: .*at least"),
        ("index: {addresses: ['foo:1', foo]}", {}, r"index\.addresses\.1 = 'foo': .*must be host:port"),
        ("index: {addresses: ['']}", {}, r"index\.addresses\.0 = '': .*must be host:port"),
        ("", {"OPENBOOK_INDEX__ADDRESSES": '["foo:65537"]'}, r"ADDRESSES: index\.addresses\.0 = 'foo:65537': .*65535"),
        ("- a\n- b", {}, r"openbook\.yaml: must map sections"),
        ("answer:\n  k: ]", {}, r"openbook\.yaml: cannot be read as YAML: line 2, column 6"),
        ("access: {keys: file}\nanswer:\naccess: {}", {}, r"YAML: line 3, column 1: access stands there a second time"),
        ("answer:\n  k: 5\n  'k': 6", {}, r"YAML: line 3, column 3: k stands there a second time"),
        ("index: {(a): 1, (a): 2}", {}, r"YAML: line 1, column 17: a key stands there a second time"),
        ("", {"OPENBOOK_INDEX__TLS": "{ca: a, ca: b}"}, r"INDEX__TLS: .* column 9: ca stands there a second time"),
    ],
)
def test_a_bad_value_is_named_with_its_source(tmp_path: Path, text: str, env: dict[str, str], message: str) -> None:
    path = tmp_path / "openbook.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=message):
        config.load(path, env)


def test_of_a_key_that_stands_twice_no_secret_is_told(tmp_path: Path) -> None:
    path = tmp_path / "openbook.yaml"
    path.write_text(f"cache: {{secret:{SECRET}, secret:{SECRET}}}\n")
    with pytest.raises(InvalidConfig, match="secret stands there a second time") as refused:
        config.load(path, {})
    assert SECRET not in in_whole(refused.value)


def test_what_a_merge_brings_in_may_be_said_anew(tmp_path: Path) -> None:
    path = tmp_path / "openbook.yaml"
    path.write_text("encoder: &model {max_batch: 8, n_threads: 2}\ngenerator: {<<: *model, max_batch: 4}\n")
    settings = config.load(path, {})
    assert (settings.generator.max_batch, settings.generator.n_threads) == (4, 2)


def test_a_mapping_may_merge_several(tmp_path: Path) -> None:
    path = tmp_path / "openbook.yaml"
    path.write_text("encoder: &a {max_batch: 8}\nindex_server: &b {n_threads: 2}\ngenerator: {<<: *a, <<: *b}\n")
    settings = config.load(path, {})
    assert (settings.generator.max_batch, settings.generator.n_threads) == (8, 2)


def test_variables_that_do_not_go_together_are_named() -> None:
    unlike = {"OPENBOOK_INDEX_SERVER__DEVICE": "cuda:0", "OPENBOOK_INDEX_SERVER__MAX_K": "3000"}
    both = "^" + ", ".join(f"environment variable {name}" for name in unlike)
    with pytest.raises(InvalidConfig, match=f"{both}: index_server: .*max_k must be at most"):
        config.load(None, unlike)
    with pytest.raises(InvalidConfig, match=f"{both}: .*max_k must be at most"):
        config.load_index_server(None, unlike, snapshot="s")


@pytest.mark.parametrize("command", [("index", "check"), ("snapshots",), ("publish", "former", "--index")])
def test_an_index_server_with_a_port_that_grpc_would_take_for_another_is_refused(command: Sequence[str]) -> None:
    with pytest.raises(OpenbookError, match=r"must be host:port with a port of 1\.\.65535"):
        CliRunner().invoke(app, [*command, "127.0.0.1:65537"], catch_exceptions=False)


def test_other_servers_are_reached_as_those_in_the_settings() -> None:
    settings = config.parse({"index": {"discover": "file:a", "tls": {"ca": "ca"}, "admin_token": SECRET}}).index
    other = settings.at(("b:1", "[fe80::1%eth0]:2"))
    assert (other.addresses, other.discover) == (("b:1", "[fe80::1%eth0]:2"), None)
    assert (other.tls, other.admin_token) == (settings.tls, settings.admin_token)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"none\.yaml: cannot be read: No such file or directory$"):
        config.load(tmp_path / "none.yaml", {})


def test_an_index_server_takes_options_then_environment_then_file(tmp_path: Path) -> None:
    path = tmp_path / "openbook.yaml"
    path.write_text("answer: {k: 7}\nindex_server: {snapshot: s, shard: 1, max_k: 10, n_threads: 3}\n")
    env = {"OPENBOOK_INDEX_SERVER__SHARD": "2", "OPENBOOK_INDEX_SERVER__ADMIN_TOKEN": "1234567890123456\n"}
    settings = config.load_index_server(path, env, n_threads=4, host=None)
    assert (settings.snapshot, settings.shard, settings.max_k, settings.n_threads) == (Path("s"), 2, 10, 4)
    assert settings.host == "127.0.0.1"
    assert settings.admin_token is not None
    assert settings.admin_token.get_secret_value() == "1234567890123456"
    assert config.load(path, env).answer.k == 7  # the other processes read the same file
    path.write_text("answer: {k: 7}\nindex_server: {n_threads: 3}\n")
    assert config.load(path, {}).answer.k == 7  # which snapshot it is, `index serve` may be told


@pytest.mark.parametrize(
    "digits",
    ["1234567812345678", "0123456701234567", "1_000_000_000_000_000", "0x1234567890abcdef", "+123456781234567800"],
)
def test_a_secret_of_digits_is_what_was_written(tmp_path: Path, digits: str) -> None:
    path = tmp_path / "openbook.yaml"
    path.write_text(f"index: {{admin_token: {digits}}}\n")
    for settings in (config.load(path, {}), config.load(None, {"OPENBOOK_INDEX__ADMIN_TOKEN": digits})):
        assert settings.index.admin_token is not None
        assert settings.index.admin_token.get_secret_value() == digits


def test_a_number_is_what_people_read() -> None:
    assert config.load(None, {"OPENBOOK_ANSWER__K": "010", "OPENBOOK_CACHE__TTL_S": "1_000"}).answer.k == 10
    with pytest.raises(InvalidConfig, match=r"ttl_s = '1:30': .*integer"):
        config.load(None, {"OPENBOOK_CACHE__TTL_S": "1:30"})


SECRET = "5ecret"
"""In every secret below; whatever is done with it, nobody reads it."""
KINDS = (config.Settings, config.IndexServerSettings, TrainingSettings, EvaluationSettings)


def models(kind: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """A model, and all that stand in it, with the keys that lead there."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield path, kind
        for name, field in kind.model_fields.items():
            yield from models(field.annotation, (*path, name))
    for each in get_args(kind):
        yield from models(each, path)


def nested(keys: Sequence[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


def in_whole(error: BaseException) -> str:
    """With all that a log could hold of it."""
    causes = [each for each in (error.__cause__, error.__context__) if each is not None]
    return "".join([*format_exception(error), repr(error), repr(error.args), *map(in_whole, causes)])


def told(load: Callable[[], config.Section]) -> str:
    """All that can be read of settings, or of why there are none."""
    try:
        settings = load()
    except InvalidConfig as error:
        return in_whole(error)
    return f"{settings!r} {settings} {settings.model_dump_json()}"


SECRETS = [
    (kind, (*path, name))
    for kind in KINDS
    for path, model in models(kind)
    for name, field in model.model_fields.items()
    if any(each in str(field.annotation) for each in ("SecretStr", "RedisUrl"))
]


def test_where_secrets_stand() -> None:
    assert [".".join(keys) for kind, keys in SECRETS] == [
        *(
            "index.admin_token",
            "cache.url",
            "cache.secret",
            "access.url",
            "admin_token",
            "retrieval.index.admin_token",
            "index.admin_token",
        )
    ]


# Around the secret: what makes it too short, masked, something else to YAML or to a URL's reader, or right.
AROUND = st.sampled_from([*"*&!%@`{}[]:#?/|>,'\"\n\t\0", "***", "redis://", "redis://:", "a@h:1/0", "0" * 16, ""])
WRONG = st.one_of(st.none(), st.booleans(), st.integers(), st.just([]), st.just({"x": SECRET}), st.just([SECRET]))


@given(st.sampled_from(SECRETS), st.data())
def test_no_secret_is_read_in_a_message(at: tuple[type[config.Section], tuple[str, ...]], data: st.DataObject) -> None:
    """Whatever else is wrong: the secret itself, its key, its section, the keys and sections beside it."""
    kind, keys = at
    text = data.draw(st.builds(lambda *parts: parts[0] + SECRET + parts[1], AROUND, AROUND))
    *sections, key = keys
    values = data.draw(
        st.sampled_from(
            [
                nested(keys, text),
                nested(keys, [text]),
                nested(keys, {text: text}),
                nested([*keys, "deeper"], text),
                nested([*sections, f"{key}s"], text),
                nested([*sections, f"{key}:{text}"], None),
                nested([*sections, key], {"a": 1}) | {"answer": {key: text}},
                nested(sections or [key], text),
                nested(sections[:1] or [key], [text]),
                nested(keys, text) | {"answer": {"k": data.draw(WRONG)}, "loop": {}, "k": data.draw(WRONG)},
                *({"retrieval": {"kind": "bm25", **nested(keys[1:], text)}} for _ in sections[1:]),
            ]
        )
    )
    assert SECRET not in told(lambda: config.section(kind, "source", **values))


@given(st.sampled_from(SECRETS), AROUND, AROUND, AROUND)
def test_no_secret_is_read_in_a_message_about_yaml(
    at: tuple[type[config.Section], tuple[str, ...]], before: str, after: str, key_end: str
) -> None:
    *_, section, key = ("index_server", *at[1])
    environment = {f"OPENBOOK_{section}__{key}{key_end}".upper(): f"{before}{SECRET}{after}"}
    with TemporaryDirectory() as folder:
        path = Path(folder, "openbook.yaml")
        path.write_text(f"{section}:\n  {key}{key_end}: {before}{SECRET}{after}\n")
        for load in (
            lambda: config.load(None, environment),
            lambda: config.load_index_server(None, environment, snapshot="s"),
            lambda: config.load(path, {}),
            lambda: config.load_index_server(path, {}),
            lambda: config.read(at[0], path),
        ):
            assert SECRET not in told(load)


def test_no_command_takes_a_secret_where_a_listing_of_processes_shows_it() -> None:
    commands: Any = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        assert {option.name for option in command.params}.isdisjoint({keys[-1] for _, keys in SECRETS} - {"url"})
    assert len(commands) > 10


@pytest.mark.parametrize("keys", [("index", "admin_token"), ("cache", "url")])
def test_what_a_secret_is_shown_as_is_not_taken_for_one(keys: tuple[str, ...]) -> None:
    settings = config.parse(nested(keys, "redis://:correct-horse@battery/0"))
    with pytest.raises(InvalidConfig, match="asterisks are how a secret is shown"):
        config.parse(settings.model_dump(mode="json"))
    assert config.parse(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("rediss://user:p%40ss@redis.example:6379", "rediss://***@redis.example:6379"),
        ("redis://:p@ss@[::1]/1", "redis://***@[::1]/1"),
        ("redis://:pa/ss@host/0", "***"),
        ("redis://:pa?ss@host/0", "***"),
        ("redis://host/0?password=pass", "***"),
        ("unix://user@/run/redis.sock?password=pass", "***"),
        ("redis://:pass", "***"),
        (":pass@host", "***"),
    ],
)
def test_a_redis_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert str(config.parse({"cache": {"url": url}}).cache.url) == shown


def test_a_bad_token_is_named() -> None:
    for short in ("short", "1234"):  # to YAML a number
        with pytest.raises(InvalidConfig, match=r"OPENBOOK_INDEX_SERVER__ADMIN_TOKEN: admin_token: .*at least 16"):
            config.load_index_server(None, {"OPENBOOK_INDEX_SERVER__ADMIN_TOKEN": short}, snapshot="s")
    with pytest.raises(ValidationError, match="admin_token") as caught:
        config.IndexServerSettings(snapshot="s", admin_token=SECRET)
    assert SECRET not in str(caught.value)
    with pytest.raises(InvalidConfig, match="printable ASCII") as refused:
        config.load(None, {"OPENBOOK_INDEX__ADMIN_TOKEN": f'"{SECRET}\\n{SECRET}"'})
    assert SECRET not in str(refused.value)


def test_a_bad_option_of_an_index_server_is_named() -> None:
    with pytest.raises(InvalidConfig, match="openbook index serve: shard = -1"):
        config.load_index_server(None, {"OPENBOOK_INDEX_SERVER__SHARD": "1"}, snapshot="s", shard=-1)
