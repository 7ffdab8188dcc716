"""A build that is killed wherever it may be goes on to the very bytes of one that was left in peace.

OPENBOOK_KILLS=N kills it at N random points, by default at a few. A point is an access to a file of the build, or a
report of progress: whatever a killed build can leave behind lies between two of them. Every fourth time two processes
encode, and one of them is killed, if they are at work.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import tiny_encoders as tiny

N_KILLS = int(os.environ.get("OPENBOOK_KILLS", "3"))
AT_ONCE = 8
N_DOCUMENTS = 40
NEVER = 1 << 60


def build(folder: Path, out: Path, kill_at: int, n_processes: int) -> None:
    """In a process of its own, which ends at the point of that number, or has one end that encodes for it.

    Says how many points there were.
    """
    from openbook.config import EncoderSettings
    from openbook.corpus import build as corpus_build
    from openbook.models.encoder import TextEncoder

    n_points = 0

    def point(*_: object) -> None:
        nonlocal n_points
        n_points += 1
        if n_points == kill_at:
            children = psutil.Process().children(recursive=True)
            workers = [child.pid for child in children if "openbook.corpus.encode" in child.cmdline()]
            os.kill(workers[0] if workers else os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        is_ours = any(isinstance(each, (str, os.PathLike)) and out.name in str(each) for each in arguments)
        if event == "mmap.__new__" or (is_ours and event.split(".")[0] in ("open", "os", "shutil")):
            point()

    encode = TextEncoder.encode_passages

    def counted(self: TextEncoder, passages: Any) -> Any:
        with (folder / f"{out.name}.encoded").open("a") as file:
            file.write("".join(f"{passage.id}\n" for passage in passages))
        return encode(self, passages)

    sys.addaudithook(audit)
    with (
        mock.patch.object(corpus_build, "ROWS_PER_STEP", AT_ONCE),
        mock.patch.object(TextEncoder, "encode_passages", counted),
    ):
        settings = EncoderSettings(model=str(folder / "encoder"), n_threads=n_processes)
        corpus_build.build_corpus(
            folder / "documents.jsonl", out, settings, 2, "IVF2,SQ8", 10, 0.9, on_progress=point, scan=None
        )
    (folder / "points").write_text(str(n_points))


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """New ones have all modules at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openbook.corpus.build", "openbook.index.shard.rescoring"])
    return context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("killed")
    tiny.saved(path / "encoder", tiny.bert_model(), tiny.bert_tokenizer())
    rng = np.random.default_rng(0)
    with (path / "documents.jsonl").open("w") as file:
        for i in range(N_DOCUMENTS):
            text = " ".join(rng.choice(tiny.WORDS, rng.integers(1, 30)))
            file.write(json.dumps({"id": str(i), "title": "moon", "text": text}) + "\n")
    return path


def run(
    processes: ForkServerContext, folder: Path, out: Path, kill_at: int = NEVER, n_processes: int = 1
) -> int | None:
    process = processes.Process(target=build, args=(folder, out, kill_at, n_processes))
    process.start()
    process.join()
    return process.exitcode


def content(snapshot: Path) -> dict[str, bytes | str]:
    files = {str(path.relative_to(snapshot)): path for path in snapshot.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop("manifest.json").read_text())  # it also says when it was made
    return {name: path.read_bytes() for name, path in files.items()} | {"id": manifest["snapshot_id"]}


def test_killed_anywhere_it_goes_on_to_the_same_bytes(processes: ForkServerContext, folder: Path) -> None:
    assert run(processes, folder, folder / "quiet") == 0
    wanted = content(folder / "quiet")
    n_points = int((folder / "points").read_text())
    encoded = (folder / "quiet.encoded").read_text().split()
    assert n_points > 50
    assert len(encoded) == len(set(encoded)) >= N_DOCUMENTS
    for seed in range(N_KILLS):
        kill_at = random.Random(seed).randint(1, n_points)
        out = folder / f"killed-{seed}"
        by_two = seed % 4 == 3
        ended = run(processes, folder, out, kill_at, 2 if by_two else 1)
        assert ended == -signal.SIGKILL or (by_two and ended in (0, 1)), kill_at
        is_done = (out / "manifest.json").exists()  # killed while it tidied up: then the next one is told so
        assert run(processes, folder, out) == (1 if is_done else 0), kill_at
        assert content(out) == wanted, kill_at
        again = folder / f"{out.name}.encoded"  # where nobody but this process encoded, those are all
        if not by_two and again.exists():
            assert set(again.read_text().split()) == set(encoded)
            assert len(again.read_text().split()) <= len(encoded) + AT_ONCE, kill_at
        assert not [*folder.glob(f"{out.name}.work"), *folder.glob(f".{out.name}.*")], kill_at
