"""A run over live index servers: what happens when, and when they fail or change in the middle of it."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_training as tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from openbook.config import IndexServerSettings
from openbook.errors import DeadlineExceeded, InvalidConfig, ShardUnavailable, SnapshotMismatch
from openbook.index.building.build import build_snapshot
from openbook.index.client.publish import publish
from openbook.index.disk.root import Root
from openbook.index.server.server import IndexServer
from openbook.testing import served
from openbook.training import run as running
from openbook.training.data import Example
from openbook.training.loop import Loss
from openbook.training.loss import Collated, RagLoss
from openbook.training.retrieval import Found, LiveIndex
from openbook.training.run import Run, train
from openbook.training.settings import TrainingSettings

pytestmark = pytest.mark.usefixtures("undrawn")
N_STEPS = 6
TIMEOUT_S = 120.0


class Files:
    """Models, questions and a root of snapshots: first, which is current, and second."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.root = folder, folder / "root"
        self.encoder, self.generator = tiny.models(folder)
        self.ids: dict[str, str] = {}
        self.questions = tiny.questions(folder)
        for name, sign in (("first", 1), ("second", -1)):
            vectors = sign * tiny.vectors(9)
            built = build_snapshot(tiny.passages(9), vectors, self.root / name, 2, "Flat", "tiny", tiny.SPACE)
            self.ids[name] = built.snapshot_id
        Root.create(self.root, self.root / "first")

    def settings(self, out: str, servers: Sequence[IndexServer], **sections: dict[str, Any]) -> TrainingSettings:
        index = {"addresses": [server.address for server in servers], "timeout_s": 10}
        given: dict[str, dict[str, Any]] = {
            "task": {"train": [{"path": str(self.questions)}]},
            "retrieval": {"snapshot": None, "index": index, "retry_s": TIMEOUT_S},
            "models": {"query_encoder": self.encoder, "generator": self.generator, "dropout": True},
            "loop": {"out": str(self.folder / out), "n_steps": N_STEPS, "micro_batch_size": 2, "checkpoint_every": 2},
        }
        return tiny.settings(
            **{name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}}
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("live"))


@pytest.fixture(scope="module")
def whole(files: Files) -> Path:
    """The folder of a run that nothing happened to."""
    with served(files.root / "first") as servers:
        return train(files.settings("whole", servers)).parent


def weights(out: Path, step: int = N_STEPS) -> dict[str, Tensor]:
    return load_file(out / f"checkpoints/step-{step:07d}/weights.safetensors")


def check_same(one: Path, other: Path) -> None:
    """To the bit."""
    assert tiny.curve(one) == tiny.curve(other)
    mine, others = weights(one), weights(other)
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)


@contextmanager
def again(server: IndexServer, snapshot: Path) -> Iterator[None]:
    """Another server where one was."""
    with IndexServer(IndexServerSettings(snapshot=snapshot, shard=server.shard.number, port=server.port)):
        yield


def test_a_step_waits_for_a_shard_that_comes_back(files: Files, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve is that of a run which missed nothing."""
    find, failures = LiveIndex._find, list[Exception]()

    with served(files.root / "first") as servers, ExitStack() as restarted:

        async def watched(self: LiveIndex, *asked: Any) -> Found:
            try:
                return await find(self, *asked)
            except (ShardUnavailable, DeadlineExceeded) as error:
                if not failures:
                    restarted.enter_context(again(servers[1], files.root / "first"))
                failures.append(error)
                raise

        def stopping(step: int, scalars: Mapping[str, float]) -> None:
            if step == 3:
                servers[1].stop(grace_s=0)

        monkeypatch.setattr(LiveIndex, "_find", watched)
        out = train(files.settings("comes-back", servers), stopping).parent
    assert "shard 1" in str(failures[0])
    check_same(out, whole)


def test_without_a_shard_the_run_ends_and_goes_on_when_it_is_back(files: Files, whole: Path) -> None:
    def stopping(step: int, scalars: Mapping[str, float]) -> None:
        if step == 3:
            servers[1].stop(grace_s=0)

    with served(files.root / "first") as servers:
        settings = files.settings("ends", servers, retrieval={"retry_s": 0})
        out = settings.loop.out
        with pytest.raises(ShardUnavailable, match="shard 1"):
            train(settings, stopping)
        assert tiny.curve(out) == tiny.curve(whole)[:3]
        with pytest.raises(ShardUnavailable, match="shard 1"):
            train(settings)
        with again(servers[1], files.root / "first"):
            train(settings)
    check_same(out, whole)


@pytest.mark.timeout(60)
def test_a_second_signal_stops_a_run_that_waits_for_a_shard(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    find, former, sent = LiveIndex._find, signal.getsignal(signal.SIGINT), list[str]()

    async def watched(self: LiveIndex, *asked: Any) -> Found:
        try:
            return await find(self, *asked)
        except (ShardUnavailable, DeadlineExceeded):
            if not sent or (len(sent) == 1 and signal.getsignal(signal.SIGINT) is former):  # the first one was heard
                sent.append("SIGINT")
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            raise

    def stopping(step: int, scalars: Mapping[str, float]) -> None:
        if step == 3:
            servers[1].stop(grace_s=0)

    monkeypatch.setattr(LiveIndex, "_find", watched)
    with served(files.root / "first") as servers, pytest.raises(KeyboardInterrupt):
        train(files.settings("waits", servers, retrieval={"retry_s": 3600}), stopping)
    assert len(sent) == 2


def test_a_run_ends_when_another_snapshot_is_published(files: Files) -> None:
    """And does not go on with it, but with its own if that is published again."""
    with ExitStack() as stack:
        asked = [IndexServerSettings(snapshot=files.root, shard=shard) for shard in (0, 1)]
        servers = [stack.enter_context(IndexServer(each)) for each in asked]
        settings = files.settings("published", servers, loop={"n_steps": 500})
        checkpoints = settings.loop.out / "checkpoints"

        def make_current(name: str) -> None:
            asyncio.run(publish(files.root / name, settings.retrieval.index))

        def publishing(step: int, scalars: Mapping[str, float]) -> None:
            if step == 3:
                make_current("second")

        begun_with, now = files.ids["first"], files.ids["second"]
        with pytest.raises(SnapshotMismatch, match=f"began with snapshot {begun_with}, .* now serves {now}"):
            train(settings, publishing)
        kept = sorted(checkpoints.iterdir())
        assert kept[0].name == "step-0000002"
        with pytest.raises(InvalidConfig, match=f"made with snapshot = '{begun_with}', this run has '{now}'"):
            train(settings)
        assert sorted(checkpoints.iterdir()) == kept
        make_current("first")

        def interrupting(step: int, scalars: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(settings, interrupting)


@pytest.mark.parametrize("size", [2, 4])
def test_the_size_of_micro_batches_changes_nothing(files: Files, size: int) -> None:
    """To 1e-6 after 5 steps in float32. Without dropout, whose random numbers are those of the micro-batch."""
    with served(files.root / "first") as servers:
        for each in (size, 8):
            loop = {"n_steps": 5, "micro_batch_size": each}
            train(files.settings(f"by-{each}", servers, loop=loop, models={"dropout": False}))
    mine, others = (weights(files.folder / f"by-{each}", 5) for each in (size, 8))
    differences = {name: float((mine[name] - others[name]).abs().max()) for name in others}
    assert max(differences.values()) < 1e-6, differences


def test_the_next_micro_batch_is_prepared_while_one_is_computed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to have begun, so without overlap neither would go on. And none of the next step is
    collated before the weights are updated."""
    n_steps, n = 3, 4
    collate, forward = RagLoss.collate, RagLoss.forward
    events: list[tuple[str, int]] = []
    begun = {kind: [threading.Event() for _ in range(n_steps * n)] for kind in ("collate", "compute")}

    def begin(kind: str) -> int:
        number = sum(each == kind for each, _ in events)
        events.append((kind, number))
        begun[kind][number].set()
        return number

    def watched_collate(self: RagLoss, examples: Sequence[Example]) -> Collated:
        number = begin("collate")
        if number % n:
            assert begun["compute"][number - 1].wait(TIMEOUT_S)
        return collate(self, examples)

    def watched_forward(self: RagLoss, collated: Collated) -> Loss:
        number = begin("compute")
        if (number + 1) % n:
            assert begun["collate"][number + 1].wait(TIMEOUT_S)
        return forward(self, collated)

    monkeypatch.setattr(RagLoss, "collate", watched_collate)
    monkeypatch.setattr(RagLoss, "forward", watched_forward)
    with served(files.root / "first") as servers:
        run = Run(files.settings("overlap", servers, loop={"n_steps": n_steps}))
        run.loop.optimizer.register_step_post_hook(lambda *_: events.append(("update", run.loop.step)))
        assert len(list(run.loop.run())) == n_steps
        run.close()
    for step in range(n_steps):
        of_step = {("update", step), *((kind, step * n + i) for kind in begun for i in range(n))}
        these, events = events[: len(of_step)], events[len(of_step) :]
        assert set(these) == of_step
        assert these[-1] == ("update", step)
    assert events == []


def test_one_run_at_a_time_in_a_folder(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "LOCK_TIMEOUT_S", 0.0)
    problems: list[str] = []

    with served(files.root / "first") as servers:
        settings = files.settings("taken", servers, loop={"n_steps": 1})

        def another(step: int, scalars: Mapping[str, float]) -> None:
            with pytest.raises(InvalidConfig) as problem:
                train(settings)
            problems.append(str(problem.value))

        train(settings, another)
        train(settings)
    assert problems[0] == f"{settings.loop.out}: another process is at work here"


def two_workers(work: Callable[[Any], None]) -> None:
    tiny.Together(2).run(work)


def test_all_workers_go_on_from_the_same_checkpoint(files: Files, whole: Path) -> None:
    """That of worker 0: another one sees none, as on a file system that is late."""

    def go_on(until: int) -> None:
        def interrupting(step: int, scalars: Mapping[str, float]) -> None:
            if step == until:
                raise KeyboardInterrupt

        def work(world: Any) -> None:
            out = str(files.folder / ("two" if world.rank == 0 else "late"))
            run = Run(files.settings("two", servers, loop={"out": out}, workers={"n_workers": 2}), world)
            try:
                run.train(interrupting)
            finally:
                run.close()

        two_workers(work)

    with served(files.root / "first") as servers:
        with pytest.raises(KeyboardInterrupt):
            go_on(3)
        go_on(N_STEPS + 1)
    mine, others = weights(files.folder / "two"), weights(whole)
    for name, value in others.items():
        torch.testing.assert_close(mine[name], value, atol=1e-6, rtol=0)


def test_workers_that_see_different_files_are_refused(files: Files) -> None:
    other = tiny.jsonl(files.folder / "other.jsonl", {"question": "who", "answers": ["bell"]})

    def work(world: Any) -> None:
        task = {"train": [{"path": str(other if world.rank else files.questions)}]}
        run = Run(files.settings("different", servers, task=task, workers={"n_workers": 2}), world)
        try:
            run.train()
        finally:
            run.close()

    problem = pytest.raises(InvalidConfig, match=r"examples: worker 0 has '.*', worker 1 has '.*'")
    with served(files.root / "first") as servers, problem:
        two_workers(work)
