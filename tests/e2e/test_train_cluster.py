"""`openbook train` on Ray: workers as one, killed and interrupted at a known step, over a live index tier."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import pytest
import ray
import tiny_training as tiny
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from openbook.cli import app
from openbook.errors import InvalidConfig, StartupError
from openbook.index.building.build import build_snapshot
from openbook.index.server.server import IndexServer
from openbook.testing import served
from openbook.training import cluster
from openbook.training.run import train
from openbook.training.settings import TrainingSettings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

OPENBOOK = [sys.executable, "-m", "openbook.cli"]
TIMEOUT_S = 300.0
N_STEPS = 8


@dataclass
class Files:
    """Models, questions, and index servers that do something when a step is recorded."""

    folder: Path
    servers: list[IndexServer]
    encoder: str
    generator: str
    questions: Path
    actions: list[tuple[Path, int, Callable[[], None]]] = field(default_factory=list)

    def config(self, out: str, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Two workers with half a batch each, in two micro-batches."""
        index = {"addresses": [server.address for server in self.servers], "timeout_s": 60}
        given: dict[str, dict[str, Any]] = {
            "task": {"train": [{"path": str(self.questions)}]},
            "retrieval": {"kind": "dense", "k": 3, "index": index, "retry_s": TIMEOUT_S},
            "models": {"query_encoder": self.encoder, "generator": self.generator},
            "loop": {"out": str(self.folder / out), "n_steps": N_STEPS, "batch_size": 8, "micro_batch_size": 2}
            | {"checkpoint_every": 3},
            "workers": {"n_workers": 2, "num_cpus": 0.5},
        }
        return {name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}}

    def settings(self, out: str, **sections: dict[str, Any]) -> TrainingSettings:
        return TrainingSettings.model_validate(self.config(out, **sections))

    def after(self, out: str, step: int, action: Callable[[], None]) -> None:
        """Do something while the step after this one is under way: once, and after what was asked for before."""
        self.actions.append((self.folder / out, step, action))

    def act(self) -> None:
        """Called before a search, which waits for it. No step is over without searches of all its questions."""
        if self.actions:
            out, step, action = self.actions[0]
            if any(line["step"] == step for line in curve(out)):
                del self.actions[0]
                action()


def watch(server: IndexServer, act: Callable[[], None]) -> None:
    search = server.shard.search_checked

    def watched(*asked: Any) -> Any:
        act()
        return search(*asked)

    server.shard.search_checked = watched  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    folder = tmp_path_factory.mktemp("cluster")
    torch.manual_seed(0)
    build_snapshot(tiny.passages(9), tiny.vectors(9), folder / "snapshot", 2, "Flat", "tiny", tiny.SPACE)
    with served(folder / "snapshot") as servers:
        files = Files(folder, servers, *tiny.models(folder), tiny.questions(folder))
        watch(servers[0], files.act)
        yield files


@pytest.fixture(scope="module")
def ray_address(files: Files) -> Iterator[str]:
    """A Ray of this process, with the CPUs of one run: what one does not give back, the next one lacks."""
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
    with cluster._connected(files.settings("any").workers):
        yield ray.get_runtime_context().gcs_address


@pytest.fixture
def alone(files: Files, undrawn: None) -> Path:
    """The folder of a run in this process that nothing happened to."""
    return train(files.settings("alone", workers={"n_workers": 1})).parent


def curve(out: Path) -> list[dict[str, float]]:
    if not (out / "metrics.jsonl").exists():
        return []
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    read = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: value for name, value in line.items() if name != "tokens_per_s"} for line in read]


def weights(out: Path, step: int) -> dict[str, Tensor]:
    return load_file(out / f"checkpoints/step-{step:07d}/weights.safetensors")


def check_same(out: Path, alone: Path) -> None:
    """Every step once, with the same numbers, and the same weights at two checkpoints; in float32, whose gradients two
    workers add up in another order.
    """
    assert [line["step"] for line in curve(out)] == list(range(1, N_STEPS + 1))
    for line, wanted in zip(curve(out), curve(alone), strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)  # the norm of gradients was seen to differ by 1e-6
    for step in (N_STEPS - 2, N_STEPS):
        mine, others = weights(out, step), weights(alone, step)
        assert mine.keys() == others.keys()
        differences = {name: float((mine[name] - value).abs().max()) for name, value in others.items()}
        assert max(differences.values()) < 1e-6, differences


def parents() -> dict[int, int]:
    """Every living process and its parent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            pid, rest = path.read_text().split(" ", 1)
            state, parent = rest.rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                found[int(pid)] = int(parent)
    return found


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    tree, found = parents(), [pid]
    for each in found:
        found += [child for child, parent in tree.items() if parent == each]
    return found


def worker(out: Path, rank: int) -> int:
    """The process of one of two workers. Worker 0 holds the lock; the other has the same parent."""
    tree = parents()
    first = next(pid for pid in tree if holds(pid, out / "lock"))
    if rank == 0:
        return first
    (other,) = (pid for pid in tree if tree[pid] == tree[first] and pid != first and "RayTrainWorker" in command(pid))
    return other


def holds(pid: int, path: Path) -> bool:
    with suppress(OSError):
        return any(os.readlink(link) == str(path) for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_an_error_of_ours_comes_in_one_line_and_is_not_tried_again(
    files: Files, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker that does nothing before: what it would import takes longer than all else here."""
    tries = files.folder / "tries"

    def work(config: Mapping[str, Any]) -> None:
        with tries.open("a") as file:
            file.write("once ")
        raise InvalidConfig(f"{config['settings'].retrieval.k} is wrong")

    monkeypatch.setattr(cluster, "_work", work)
    with pytest.raises(InvalidConfig) as raised:
        cluster.fit(files.settings("wrong", workers={"n_workers": 1, "max_failures": 1}))
    assert (str(raised.value), tries.read_text()) == ("3 is wrong", "once ")


def test_the_cluster_that_is_named_comes_before_that_of_the_environment(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(address: str) -> None:
        raise StartupError(address)

    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.local_ray, "joined", joined)
    monkeypatch.setenv("RAY_ADDRESS", "environment:1")
    config = files.folder / "named.yaml"
    config.write_text(yaml.safe_dump(files.config("named")))
    for options, problem in (
        (["--ray", "option:1"], "option:1"),
        ([], "environment:1"),
        (["--local", "--ray", "option:1"], "--local trains without Ray, got --ray option:1 too"),
    ):
        assert str(CliRunner().invoke(app, ["train", str(config), *options]).exception) == problem


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_workers_with_a_gpu_each_are_told_of_no_other_device_before_anything_starts(files: Files, device: str) -> None:
    asked = files.settings("elsewhere", loop={"device": device}, workers={"use_gpu": True})
    with pytest.raises(InvalidConfig, match=f"loop.device must be auto or cuda with workers.use_gpu, got {device}"):
        cluster.fit(asked)
    assert not (files.folder / "elsewhere").exists()


@contextmanager
def driver(files: Files, out: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`openbook train` in a process of its own, and what it says to standard error. Nothing of it is left."""
    config, log = files.folder / f"{out}.yaml", files.folder / f"{out}.log"
    config.write_text(yaml.safe_dump(files.config(out)))
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as stderr:
        command = [*OPENBOOK, "train", str(config)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
    with process:
        try:
            yield process, log
        finally:
            for pid in family(process.pid):
                with suppress(ProcessLookupError):
                    kill(pid)


def await_end(pids: Sequence[int]) -> None:
    """All that belongs to the run. Ray's agents, which do not, stay for another minute: they are ended here."""
    give_up = monotonic() + TIMEOUT_S
    while left := {pid: command(pid) for pid in parents() if pid in pids}:
        if all("Agent" in each for each in left.values()):
            for pid in left:
                with suppress(ProcessLookupError):
                    kill(pid)
        assert monotonic() < give_up, left
        sleep(0.1)  # they are no children of ours


def test_where_a_run_goes_on_is_told_before_its_workers_are_there(tmp_path: Path) -> None:
    (tmp_path / cluster.CHECKPOINTS / "step-0000006").mkdir(parents=True)
    told: list[tuple[int, Mapping[str, float]]] = []
    with cluster._followed(tmp_path, lambda step, scalars: told.append((step, scalars))):
        assert told == [(6, {})]


def test_whatever_ends_a_run_of_two_workers_the_same_call_goes_on_to_the_end_of_one_alone(
    files: Files, alone: Path, ray_address: str
) -> None:
    """With half the batch each. A worker killed when none may fail, Ctrl-C, its driver killed; at last a worker that is
    replaced.
    """
    out, told, interrupted, ended = files.folder / "run", list[int](), Event(), Event()
    running = set[str]()
    handler = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait(TIMEOUT_S)

    def end_driver(process: subprocess.Popen[bytes]) -> None:
        members = family(process.pid)
        kill(process.pid)
        process.wait(TIMEOUT_S)
        await_end(members)  # before their search is over: they might reach the last step without a driver
        ended.set()

    def kill_other() -> None:
        running.update(map(command, family(os.getpid())))
        kill(worker(out, 1))

    files.after("run", 4, kill_other)
    with pytest.raises(cluster.WorkersFailed, match=r"max_failures = 0 times, last worker \d: .*") as raised:
        cluster.fit(files.settings("run", workers={"max_failures": 0}), lambda step, scalars: told.append(step))
    assert "\n" not in str(raised.value)
    assert told == [1, 2, 3, 4]
    assert any("RayTrainWorker" in each for each in running)
    assert not any("DatasetManager" in each for each in running), "which nobody asks"

    files.after("run", 5, interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster.fit(files.settings("run"))
    interrupted.set()
    assert signal.getsignal(signal.SIGINT) is handler

    with driver(files, "run") as (process, log):
        files.after("run", 5, lambda: end_driver(process))
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL, log.read_text()
        assert ended.wait(TIMEOUT_S)

    told.clear()
    files.after("run", 7, lambda: kill(worker(out, 0)))
    cluster.fit(files.settings("run"), lambda step, scalars: told.append(step))
    assert files.actions == []
    assert "worker 0: " in (out / cluster.LOG).read_text()
    assert told[-2:] == [7, 8]
    check_same(out, alone)
