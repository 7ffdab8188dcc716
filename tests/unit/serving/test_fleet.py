"""What a keeper does about the nodes that it sees, and what it is told."""

import re
import subprocess
import threading
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from openbook.errors import InvalidConfig, StartupError
from openbook.files import at_home
from openbook.serving.launch import cluster, fleet, ports
from openbook.serving.launch.fleet import IndexNode, Keeper, Wanted, lacking
from openbook.serving.launch.ports import ClusterPorts

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
    token.write_bytes(b"\x84")
    with pytest.raises(InvalidConfig, match=r"Ray's token cannot be read: 'utf-8' codec"):
        cluster.password()
    token.unlink()
    with pytest.raises(InvalidConfig, match=r"Ray's token cannot be read: No such file"):
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
        ({"cache": {"url": None}, "access": {"keys": "redis", "url": None}}, True, True),
    ],
)
def test_a_redis_is_started_for_whom_nobody_has_named_one(args: Any, needs_cache: bool, needs_keys: bool) -> None:
    assert (ports.needs_cache(args), ports.needs_keys(args)) == (needs_cache, needs_keys)


HEAD = "node-0"


class FakeServe:
    """Tells of one application what the test says, one thing after the other; then no more. None: it is away."""

    def __init__(self, *told: dict[str, Any] | None, proxies: Iterable[str] = (), location: str = "EveryNode") -> None:
        self._told = iter(told)
        self._proxies = iter(proxies)
        self._location = location

    def get_serve_details(self) -> dict[str, Any]:
        if (told := next(self._told)) is None:
            raise RuntimeError("status code 503")
        proxies = {
            f"node-{i}": {"node_ip": f"10.0.0.{i}", "status": status, "log_file_path": "/serve/proxy.log"}
            for i, status in enumerate(next(self._proxies, "HEALTHY").split())
        }
        applications = {"openbook": told, "another": {"status": "DEPLOY_FAILED"}}
        return {"applications": applications, "proxies": proxies, "proxy_location": self._location}


NO_ROOM = {
    "status": "DEPLOYING",
    "message": "",
    "deployments": {
        "Ingress": {"status": "HEALTHY", "message": ""},
        "Generator": {"status": "UPDATING", "message": "1 replicas that need a GPU"},
    },
}


def test_a_deployment_says_once_what_serve_waits_for_and_ends_when_it_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    begins, runs = {"status": "DEPLOYING", "message": ""}, {"status": "RUNNING", "message": ""}
    with caplog.at_level("INFO", cluster.log.name):
        cluster.wait_until_running(FakeServe(begins, NO_ROOM, NO_ROOM, None, runs), "openbook", 60.0, HEAD)
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for openbook: DEPLOYING",
        "waiting for openbook: DEPLOYING; Generator UPDATING 1 replicas that need a GPU",
        "waiting for openbook: Ray's dashboard: status code 503",
    ]


class FakeDashboard:
    """Ray's, which is away or at a loss for some tries; and what it was given."""

    def __init__(self, *problems: Exception) -> None:
        self._problems = list(problems)
        self.given: list[Any] = []

    def __call__(self, address: str) -> "FakeDashboard":
        if self._problems:
            raise self._problems.pop()
        return self

    def deploy_applications(self, values: Any) -> None:
        self("")
        self.given.append(values)


def test_a_config_is_handed_in_once_rays_dashboard_takes_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    dashboard = FakeDashboard(RuntimeError("status code 503"), ConnectionError("refused"), ConnectionError("refused"))
    monkeypatch.setattr("ray.dashboard.modules.serve.sdk.ServeSubmissionClient", dashboard)
    with caplog.at_level("INFO", cluster.log.name):
        assert cluster.handed_in({"applications": []}, "http://127.0.0.1:8265", 60.0) is dashboard
    assert dashboard.given == [{"applications": []}]
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the config to be taken: Ray's dashboard: refused",
        "waiting for the config to be taken: Ray's dashboard: status code 503",
    ]
    dashboard = FakeDashboard(ConnectionError("refused"))
    monkeypatch.setattr("ray.dashboard.modules.serve.sdk.ServeSubmissionClient", dashboard)
    with pytest.raises(StartupError, match=r"the config cannot be handed in after -1 s: .* refused"):
        cluster.handed_in({"applications": []}, "http://127.0.0.1:8265", -1.0)


@pytest.mark.parametrize(
    "refusal",
    [
        "Request failed with status code 400: ValueError: no such thing",
        "Version check returned 404. Serve CLI is not supported on the Ray cluster.",
        "The Serve CLI requires the ray[default] installation",
    ],
)
def test_what_rays_dashboard_refuses_is_told_at_once(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.dashboard.modules.serve.sdk.ServeSubmissionClient", FakeDashboard(RuntimeError(refusal)))
    with pytest.raises(StartupError, match=re.escape(refusal)):
        cluster.handed_in({"applications": []}, "http://127.0.0.1:8265", 60.0)


RUNS = {"status": "RUNNING", "message": ""}


def test_what_runs_is_deployed_once_the_heads_proxy_answers_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    with caplog.at_level("INFO", cluster.log.name):
        serve = FakeServe(RUNS, RUNS, RUNS, proxies=["", "STARTING HEALTHY", "HEALTHY UNHEALTHY"])
        cluster.wait_until_running(serve, "openbook", 60.0, HEAD)
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for openbook: no proxy answers on the head",
        "waiting for openbook: no proxy answers on the head: 10.0.0.0 STARTING, 10.0.0.1 HEALTHY",
    ]
    with pytest.raises(StartupError, match=r"openbook does not run after .* on the head: 10\.0\.0\.0 STARTING"):
        cluster.wait_until_running(FakeServe(RUNS, proxies=["STARTING"]), "openbook", -1.0, HEAD)
    cluster.wait_until_running(FakeServe(RUNS, proxies=[""], location="Disabled"), "openbook", -1.0, HEAD)


@pytest.mark.parametrize(
    ("told", "timeout_s", "message"),
    [
        ({"status": "DEPLOY_FAILED", "message": "no such model"}, 60.0, "openbook cannot be deployed: .* no such"),
        (NO_ROOM, -1.0, "openbook does not run after .* that need a GPU"),
    ],
)
def test_a_deployment_that_fails_or_finds_no_room_is_told(
    told: dict[str, Any], timeout_s: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "POLL_S", 0.0)
    with pytest.raises(StartupError, match=message):
        cluster.wait_until_running(FakeServe(told), "openbook", timeout_s, HEAD)


WANTED = Wanted("~/snapshot", 2, ClusterPorts(), has_cache=True, keys_folder="~/keys", password="word")


NODE_ID = "ab" * 28


class FakeRay:
    """A cluster of one index node, whose actor can be asked. What it says is what the test says."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.n_started, self.n_asked = 0, 0
        self.told = [as_ray_tells((NODE_ID, True, True))]
        self.wishes: dict[str, Any] = {}
        self.killed: list[Any] = []
        self.says: Exception | None = None
        self.serve = SimpleNamespace(remote=self._asked)

    def _asked(self) -> int:
        self.n_asked += 1
        return self.n_asked

    def nodes(self) -> list[dict[str, Any]]:
        return self.told

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return refs, []

    def get(self, ref: Any) -> None:
        if self.says:
            raise self.says

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def remote(self, *_: Any) -> Any:
        if not _ or isinstance(_[0], type):
            return self
        self.n_started += 1
        return self

    def options(self, **wishes: Any) -> Any:
        self.wishes = wishes
        return self


@pytest.fixture
def cluster_of_one(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    found = FakeRay()
    monkeypatch.setattr(fleet, "ray", found)
    return found


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch, cluster_of_one: FakeRay) -> Keeper:
    monkeypatch.setattr(fleet, "setup_logging", lambda role: None)
    monkeypatch.setattr(Keeper, "_start_redis", lambda self: [])
    monkeypatch.setattr(Keeper, "_go_on", lambda self: None)
    return Keeper(WANTED)


class FakeRedis:
    """One whose first start fails, for its port is taken."""

    n_starts = 0

    def __init__(self, **_: Any) -> None:
        FakeRedis.n_starts += 1
        if FakeRedis.n_starts == 1:
            raise StartupError("port 6380 is taken")
        self.process = subprocess.Popen(["sleep", "1000"])

    def address(self) -> str:
        return "redis://127.0.0.1:6380/0"

    def answers(self, timeout_s: float) -> bool:
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def test_a_redis_whose_first_start_failed_is_begun_anew_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch, cluster_of_one: FakeRay
) -> None:
    monkeypatch.setattr(FakeRedis, "n_starts", 0)
    monkeypatch.setattr(fleet, "RedisServer", FakeRedis)
    monkeypatch.setattr(fleet, "setup_logging", lambda role: None)
    monkeypatch.setattr(Keeper, "_go_on", lambda self: None)
    keeper = Keeper(replace(WANTED, keys_folder=""))
    try:
        with pytest.raises(StartupError, match="port 6380 is taken"):
            keeper.serve()
        for _ in range(2):
            keeper._look()
            keeper.serve()
        assert FakeRedis.n_starts == 2
    finally:
        keeper.stop()


def test_index_servers_are_found_by_the_name_of_their_node_and_run_there_alone(
    keeper: Keeper, cluster_of_one: FakeRay
) -> None:
    """Whichever keeper asks: one that was started again must not begin them a second time."""
    keeper._look()
    wishes = cluster_of_one.wishes
    assert (wishes["name"], wishes["lifetime"], wishes["get_if_exists"]) == (f"index-{NODE_ID}", "detached", True)
    where = wishes["scheduling_strategy"]
    assert (where.node_id, where.soft) == (NODE_ID, False)


def test_a_node_that_is_gone_is_told_once_and_asked_no_more(
    keeper: Keeper, cluster_of_one: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        keeper._look()
    cluster_of_one.told = []
    for _ in range(3):
        keeper._look()
    assert (keeper._nodes, keeper._serving, cluster_of_one.n_asked) == ({}, set(), 2)
    assert [each.getMessage() for each in caplog.records] == [f"index node {NODE_ID} is gone"]


@pytest.mark.parametrize("problem", [RuntimeError("can't start new thread"), ray.exceptions.RaySystemError("away")])
def test_a_keeper_looks_again_whatever_a_look_ends_with(
    problem: Exception, monkeypatch: pytest.MonkeyPatch, cluster_of_one: FakeRay
) -> None:
    looks, has_looked_again = [problem], threading.Event()

    def nodes() -> list[dict[str, Any]]:
        if looks:
            raise looks.pop()
        has_looked_again.set()
        return []

    monkeypatch.setattr(cluster_of_one, "nodes", nodes)
    monkeypatch.setattr(fleet, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(fleet, "setup_logging", lambda role: None)
    monkeypatch.setattr(Keeper, "_start_redis", lambda self: [])
    keeper = Keeper(WANTED)
    try:
        assert has_looked_again.wait(60)
    finally:
        keeper.stop()


@pytest.mark.parametrize(("has_cache", "keys_folder"), [(True, "~/keys"), (True, ""), (False, "~/keys"), (False, "")])
def test_each_redis_knows_the_password_and_that_of_the_keys_forgets_nothing(
    has_cache: bool, keys_folder: str, monkeypatch: pytest.MonkeyPatch, cluster_of_one: FakeRay, tmp_path: Path
) -> None:
    begun = {}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(fleet, "RedisServer", dict)
    monkeypatch.setattr(fleet, "Supervised", lambda name, begin: begun.update({name: begin()}))
    monkeypatch.setattr(fleet, "setup_logging", lambda role: None)
    monkeypatch.setattr(Keeper, "_go_on", lambda self: None)
    Keeper(replace(WANTED, has_cache=has_cache, keys_folder=keys_folder))
    both = {"host": "0.0.0.0", "password": "word"}
    cache = {**both, "port": 6380, "max_memory_bytes": fleet.CACHE_BYTES}
    keys = {**both, "port": 6381, "keeps_in": tmp_path / "keys"}
    wanted = {"the cache's Redis": has_cache and cache, "the keys' Redis": keys_folder and keys}
    assert begun == {name: each for name, each in wanted.items() if each}


class FormerKeeper:
    """An actor that keeps something; and what became of it."""

    def __init__(self, wanted: Wanted | None, serve: Exception | None = None, stop: Exception | None = None) -> None:
        self.said: list[Any] = []
        self._results = {"wanted": wanted, "serve": serve, "stop": stop}

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.said += [name, *arguments]
            return self._results[name]

        return SimpleNamespace(remote=remote)


def failed(problem: str) -> ray.exceptions.RayTaskError:
    return ray.exceptions.RayTaskError("call", "", StartupError(problem))


@pytest.mark.parametrize(
    ("former", "said", "is_replaced"),
    [
        (FormerKeeper(WANTED), ["wanted", "serve"], False),
        (FormerKeeper(WANTED, serve=failed("port 6380 is taken")), ["wanted", "serve", "stop", WANTED], True),
        (FormerKeeper(replace(WANTED, n_shards=9)), ["wanted", "stop", WANTED], True),
        (FormerKeeper(None, stop=failed("it takes no successor")), ["wanted", "stop", WANTED], True),
    ],
)
def test_a_former_keeper_goes_on_where_it_keeps_what_is_wanted_and_else_is_ended(
    former: FormerKeeper,
    said: list[Any],
    is_replaced: bool,
    monkeypatch: pytest.MonkeyPatch,
    cluster_of_one: FakeRay,
) -> None:
    """It is told who follows, so that index servers which both want go on."""

    def get(value: Any, timeout: float) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(cluster_of_one, "get", get)
    monkeypatch.setattr(cluster_of_one, "get_actor", lambda name, namespace: former, raising=False)
    fleet.keep(WANTED, 60.0)
    assert former.said == said
    assert (cluster_of_one.killed, cluster_of_one.n_started) == (([former], 1) if is_replaced else ([], 0))
    assert not is_replaced or cluster_of_one.wishes["name"] == fleet.KEEPER


def test_index_servers_stay_where_only_what_others_need_changes(keeper: Keeper, cluster_of_one: FakeRay) -> None:
    keeper._look()
    keeper.stop(replace(WANTED, has_cache=False, keys_folder="", password="other"))
    assert not cluster_of_one.killed
    for successor in (replace(WANTED, n_shards=3), replace(WANTED, snapshot="other"), None):
        keeper.stop(successor)
        assert cluster_of_one.killed.pop() is cluster_of_one


def test_a_keeper_that_was_told_to_stop_keeps_nothing(keeper: Keeper) -> None:
    """Or who wishes for what it once kept would take it for the one that does."""
    assert keeper.wanted() == WANTED
    keeper.stop(replace(WANTED, has_cache=False))
    assert keeper.wanted() is None


def test_a_keeper_begins_nothing_once_it_has_stopped(monkeypatch: pytest.MonkeyPatch, cluster_of_one: FakeRay) -> None:
    """Whose look is under way when it is told to: the index node of that look is ended too."""
    looks, goes_on = threading.Event(), threading.Event()

    def nodes() -> list[dict[str, Any]]:
        looks.set()
        goes_on.wait(60)
        return [as_ray_tells((NODE_ID, True, True))]

    monkeypatch.setattr(cluster_of_one, "nodes", nodes)
    monkeypatch.setattr(fleet, "setup_logging", lambda role: None)
    monkeypatch.setattr(Keeper, "_start_redis", lambda self: [])
    keeper = Keeper(WANTED)
    assert looks.wait(60)
    stopping = threading.Thread(target=keeper.stop)
    stopping.start()
    assert keeper._stopped.wait(60)
    goes_on.set()
    stopping.join(60)
    assert not keeper._thread.is_alive()
    assert (cluster_of_one.n_started, cluster_of_one.killed) == (1, [cluster_of_one])


def test_index_servers_are_asked_again_and_again_and_not_ended_where_some_do_not_start(
    keeper: Keeper, cluster_of_one: FakeRay
) -> None:
    for n in range(1, 4):
        keeper._look()
        assert (cluster_of_one.n_asked, cluster_of_one.n_started) == (n, 1)
    cluster_of_one.says = ray.exceptions.ActorUnavailableError("the network", None)
    keeper._look()
    assert (cluster_of_one.killed, cluster_of_one.n_started) == ([], 2), "by its name the same one is found"
    cluster_of_one.says = ray.exceptions.RayTaskError("serve", "", StartupError("no snapshot"))
    keeper._look()
    assert (cluster_of_one.killed, keeper._serving) == ([], set()), "the other shards of that node are served"
    cluster_of_one.says = None
    keeper._look()
    assert keeper._serving == {NODE_ID}


def test_an_index_server_that_does_not_start_is_begun_anew_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged, begun, ended = {"the index server of shard 0"}, list[str](), list[str]()

    class FakeServer:
        def __init__(self, name: str, begin: partial[Any]) -> None:
            self._name, self._is_damaged = name, name in damaged
            begun.append(name[-1])
            shard = int(name[-1])
            assert begin.args == (at_home(WANTED.snapshot), shard)
            assert begin.keywords == {"host": "0.0.0.0", "port": 7000 + shard}

        def address(self) -> str:
            if self._is_damaged:
                raise StartupError(f"{self._name}: vectors.npy was altered")
            return "127.0.0.1:7000"

        def stop(self) -> None:
            ended.append(self._name[-1])

    monkeypatch.setattr(fleet, "setup_logging", lambda role: None)
    monkeypatch.setattr(fleet, "Supervised", FakeServer)
    node = IndexNode(WANTED)
    for n in range(1, 3):
        with pytest.raises(StartupError, match=r"^the index server of shard 0: vectors\.npy was altered$"):
            node.serve()
        assert (begun, ended) == ([*"01", *("0" * n)], ["0"] * n)
    damaged.clear()
    with pytest.raises(StartupError):
        node.serve()
    node.serve()
    assert begun.count("1") == 1
