"""Who encodes passages on a machine, and what is said when a GPU has no room."""

import os
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from openbook.config import EncoderSettings
from openbook.core.types import Passage
from openbook.corpus import encode
from openbook.errors import StartupError
from openbook.index.disk.arrays import new_array
from openbook.index.disk.store import write_passages
from openbook.processes import start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_passages(tmp_path, [Passage(i, "", "", f"text {i}") for i in range(3)])
    encode.plan_rows(tmp_path, torch.zeros(3, dtype=torch.bool).numpy(), 3)
    return tmp_path


def on(device: str, n_threads: int) -> list[tuple[str, int]]:
    """Device and threads of each process."""
    everyone = encode.everyone(EncoderSettings(device=device, n_threads=n_threads))
    return [(settings.device, settings.n_threads) for settings in everyone]


@pytest.mark.parametrize("n_gpus", [1, 2, 8])
@pytest.mark.parametrize("n_cores", [1, 3, 16, 96])
def test_gpus_share_the_cores_and_none_is_left_out(monkeypatch: pytest.MonkeyPatch, n_gpus: int, n_cores: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    everyone = on("auto", n_cores)
    assert on("cuda", n_cores) == everyone
    of_each = [sum(device == f"cuda:{i}" for device, _ in everyone) for i in range(n_gpus)]
    assert sum(of_each) == len(everyone)
    assert 1 <= min(of_each) <= max(of_each) <= min(encode.GPU_PROCESSES, min(of_each) + 1)
    assert everyone[0][0] == "cuda:0", "where the model of this process is"
    n_used = sum(n_threads for _, n_threads in everyone)
    assert n_used <= max(n_cores, n_gpus)
    assert n_used > n_cores - len(everyone)
    assert {device for device, _ in on("cuda:1", n_cores)} == {"cuda:1"}


def test_on_a_cpu_each_core_has_a_process_of_one_thread() -> None:
    assert on("cpu", 3) == [("cpu", 1)] * 3


def test_all_processes_compute_in_the_dtype_of_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def other(folder: Path, settings: EncoderSettings) -> None:
        asked.append(settings.dtype)
        raise StartupError("enough was seen")

    monkeypatch.setattr(encode, "Worker", other)
    monkeypatch.setattr(encode, "ROWS_PER_PROCESS", 1)
    first: Any = SimpleNamespace(dtype="bfloat16")
    settings = EncoderSettings(device="cpu", dtype="auto", n_threads=2)
    with pytest.raises(StartupError, match="enough was seen"):
        encode.encode(folder, [range(3)], settings, first, lambda step: None)
    assert asked == ["bfloat16"]


def test_a_gpu_without_room_is_told_in_a_line(folder: Path) -> None:
    def full(passages: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model: Any = SimpleNamespace(encode_passages=full, dtype="float32")
    settings = EncoderSettings(device="cpu", n_threads=1)
    with pytest.raises(StartupError, match=r"memory is full; with one thread .*: CUDA out of memory. Tried"):
        encode.encode(folder, [range(3)], settings, model, lambda step: None)


class Loud:
    """An encoder whose library speaks on standard output."""

    def encode_passages(self, passages: list[Passage]) -> Any:
        os.write(1, b"onednn_verbose,exec\n")
        return torch.ones(len(passages), 2).numpy()


def test_what_libraries_print_is_no_word_of_a_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    new_array(folder / encode.VECTORS, np.float32, (3, 2)).flush()
    monkeypatch.setattr(encode.TextEncoder, "load", lambda *_, **__: Loud())
    monkeypatch.setattr("sys.stdin", ["0 3\n"])
    encode.main(str(folder), EncoderSettings().model_dump_json())
    assert capfd.readouterr() == ("ready\ndone\n", "onednn_verbose,exec\n")


def test_a_worker_that_says_anything_else_has_encoded_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "print('banner', 'and more, ready', 'onednn_verbose', sep=chr(10), flush=True); input()"
    monkeypatch.setattr(encode, "start", lambda _, **options: start([sys.executable, "-c", script], **options))

    def asked(worker: encode.Worker) -> None:
        worker.ready()
        worker.write(range(3))

    says = pytest.raises(StartupError, match=r"encodes passages 0..2 said 'onednn_verbose'")
    with closing(encode.Worker(folder, EncoderSettings(n_threads=1))) as worker, says:
        asked(worker)
