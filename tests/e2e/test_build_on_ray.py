"""`openbook build --ray`: a corpus that is encoded by tasks of a real Ray, whose processes are killed meanwhile."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import tiny_encoders as tiny
import torch
from typer.testing import CliRunner

from openbook import local_ray, ray_encoding
from openbook.cli import app
from openbook.config import EncoderSettings
from openbook.core.splitting import Splitting
from openbook.core.types import Passage
from openbook.corpus import build as corpus_build
from openbook.errors import InvalidConfig, InvalidModel, OpenbookError, StartupError
from openbook.index.disk.snapshot import Manifest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

N_DOCUMENTS = 60
AT_ONCE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A corpus and an encoder, and a Ray of this process, which takes it that there is a GPU."""
    path = tmp_path_factory.mktemp("on-ray")
    tiny.saved(path / "encoder", tiny.bert_model(), tiny.bert_tokenizer())
    rng = np.random.default_rng(0)
    with (path / "documents.jsonl").open("w") as file:
        for i in range(N_DOCUMENTS):
            text = " ".join(rng.choice(tiny.WORDS, rng.integers(1, 30)))
            file.write(json.dumps({"id": str(i), "title": "moon", "text": text}) + "\n")
    with local_ray.started(2, {"RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'}, log_to_driver=False):
        yield path


def build(folder: Path, out: str, on_ray: bool, on_encoded: Callable[[int], None] = lambda n_done: None) -> Manifest:
    settings = EncoderSettings(model=str(folder / "encoder"), n_threads=1)

    def on_progress(stage: str, done: int, total: int) -> None:
        if stage == "encode":
            on_encoded(done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_build, "ROWS_PER_STEP", AT_ONCE)
        elsewhere = ray_encoding.RayEncoders(settings) if on_ray else None
        return corpus_build.build_corpus(
            folder / "documents.jsonl", folder / out, settings, 2, "Flat", Splitting(10), on_progress=on_progress,
            elsewhere=elsewhere,
        )  # fmt: skip


def content(snapshot: Path) -> dict[str, Any]:
    files = {str(path.relative_to(snapshot)): path for path in snapshot.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop("manifest.json").read_text())
    del manifest["created_at"]
    return {name: path.read_bytes() for name, path in files.items()} | {"manifest": manifest}


def dies_once(noted: Path) -> Callable[[str, Sequence[Passage]], ray_encoding.Encoded | OpenbookError]:
    """`ray_encoding.encode`, in whose first task with passages the process is killed; its number is noted in a file.

    From outside, tasks this small are over before anybody has found their process."""

    def encode_or_die(settings: str, passages: Sequence[Passage]) -> ray_encoding.Encoded | OpenbookError:
        if passages and not noted.exists():
            noted.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return ray_encoding.encode(settings, passages)

    return encode_or_die


def test_processes_and_the_driver_may_end_and_the_bytes_are_those_of_a_build_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(folder, "here", on_ray=False)
    done_then: list[int] = []

    def interrupt(n_done: int) -> None:
        done_then.append(n_done)
        if n_done >= 4 * AT_ONCE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(folder, "there", on_ray=True, on_encoded=interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(ray_encoding, "encode", dies_once(folder / "killed"))
        build(folder, "there", on_ray=True, on_encoded=done_then.append)
    assert not psutil.pid_exists(int((folder / "killed").read_text()))
    assert done_then == sorted(done_then), "nothing is encoded again that was noted"
    assert done_then.count(4 * AT_ONCE) == 2
    assert content(folder / "there") == content(folder / "here")


def test_on_the_command_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = []
    monkeypatch.setattr(local_ray, "joined", lambda address: addresses.append(address) or nullcontext())
    command = ["build", str(folder / "documents.jsonl"), "--out", str(folder / "by-command"), "--threads", "1"]
    command += ["--encoder", str(folder / "encoder"), "--words", "10", "--shards", "2"]
    done = CliRunner().invoke(app, [*command, "--ray", "head:6379"])
    assert done.exit_code == 0, done.output
    assert addresses == ["head:6379"]
    assert content(folder / "by-command")["manifest"]["n_passages"] >= N_DOCUMENTS
    refused = CliRunner().invoke(app, [*command, "--out", str(folder / "refused"), "--ray-gpus", "0.5"])
    assert isinstance(refused.exception, InvalidConfig)
    assert "got 0.5 without --ray" in str(refused.exception)


def test_what_is_not_the_same_on_the_nodes_ends_the_build(folder: Path) -> None:
    settings = EncoderSettings(model=str(folder / "encoder"), n_threads=1)
    with pytest.raises(InvalidModel, match="the encoder must be another, as here, found"):
        ray_encoding.RayEncoders(settings).embeds_passages_by("another")
    missing = settings.model_copy(update={"model": "/nowhere/encoder"})
    with pytest.raises(InvalidModel, match="/nowhere/encoder"):
        ray_encoding.RayEncoders(missing).embeds_passages_by("any")


def test_what_computes_otherwise_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("openbook.ray_encoding.ray.get", lambda task: task)
    encoders = ray_encoding.RayEncoders(EncoderSettings())
    found = [ray_encoding.Encoded("space", "model", by, np.empty((0, 1), np.float32)) for by in "abbcb"]
    encoders._first = found[0]
    assert [encoders._result(each) for each in found] == found
    assert [record.args for record in caplog.records] == [("a", "b"), ("a", "c")]


def test_what_computes_is_named_by_its_make(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(space="space", embeds_passages_by="model", encode_passages=lambda passages: None)
    monkeypatch.setattr(ray_encoding, "_model", lambda settings: model)
    monkeypatch.setattr(torch.cuda, "get_device_name", {"cuda": "NVIDIA L4"}.get)
    makes = {"cpu": torch.backends.cpu.get_cpu_capability(), "cuda": "NVIDIA L4"}
    for device, make in makes.items():
        found = ray_encoding.encode(EncoderSettings(device=device).model_dump_json(), [])
        assert isinstance(found, ray_encoding.Encoded)
        assert found.computed_by == f"torch {torch.__version__}, {make}"


def test_tasks_with_a_share_of_a_gpu_compute_there() -> None:
    shares = {0.0: False, 0.25: True}
    assert {gpus: ray_encoding.RayEncoders(EncoderSettings(num_gpus=gpus)).on_gpu for gpus in shares} == shares


def test_processes_with_a_share_of_a_gpu_keep_their_model_from_task_to_task(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes, that is: these import no model, which takes seconds."""
    monkeypatch.setattr(ray_encoding, "encode", lambda settings, passages: os.getpid())
    settings, n_tasks = EncoderSettings(num_gpus=0.25), 6
    encoders = ray_encoding.RayEncoders(settings)
    assert len(set(ray.get([encoders._encode.remote("", []) for _ in range(n_tasks)]))) < n_tasks


def test_a_gpu_without_room_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(passages: Sequence[Passage]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = SimpleNamespace(space="space", embeds_passages_by="model", encode_passages=full)
    monkeypatch.setattr(ray_encoding, "_model", lambda settings: model)
    told = ray_encoding.encode(EncoderSettings(device="cpu").model_dump_json(), [])
    assert isinstance(told, StartupError)
    assert str(told).startswith("a GPU's memory is full: reserve more of it with --ray-gpus: CUDA out of memory")
