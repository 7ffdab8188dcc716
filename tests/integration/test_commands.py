"""Commands that move snapshots and build them, as an operator types them."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_snapshot
import tiny_encoders
from small_snapshot import VECTORS
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import IndexServerSettings
from openbook.core.types import Passage
from openbook.index.building.build import build_snapshot
from openbook.index.disk import bm25
from openbook.index.disk.root import Root
from openbook.index.disk.snapshot import Snapshot
from openbook.index.server.server import IndexServer


def openbook(*words: object) -> str:
    """What a command prints that succeeds."""
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_snapshot_is_pushed_fetched_served_and_replaced_by_one_that_servers_see_elsewhere(tmp_path: Path) -> None:
    bucket, root, here = f"file://{tmp_path}/bucket", tmp_path / "root", tmp_path / "here"
    built = small_snapshot.build(tmp_path)
    first = Snapshot.open(built).manifest.snapshot_id
    assert openbook("index", "push", built, f"{bucket}/first") == f"{bucket}/first: snapshot {first}\n"
    assert openbook("index", "fetch", f"{bucket}/first", root / "first") == f"{root / 'first'}: snapshot {first}\n"
    assert openbook("index", "root", root, root / "first") == f"{root}: serves {root / 'first'}\n"

    passages = [Passage(i, f"doc-{i}", f"title {i}", f"another {i}") for i in range(len(VECTORS))]
    second = build_snapshot(passages, -VECTORS, here, 1, "Flat", "encoder", "fingerprint").snapshot_id
    openbook("index", "push", here, f"{bucket}/second")
    openbook("index", "fetch", f"{bucket}/second", root / "second", "--shard", 0)
    with IndexServer(IndexServerSettings(snapshot=root)) as server:
        said = openbook("publish", here, "--at-servers", root / "second", "--index", server.address)
        assert said == f"{here}: current at all servers, publication 2\n"
        assert Root(root).read().current == "second", "by its name in the root, not by the publisher's path"
        at_server, in_root = openbook("snapshots", server.address), openbook("snapshots", root)
    for listed in (at_server, in_root):
        (current,) = (line for line in listed.splitlines() if "current" in line)
        assert second[:12] in current
        assert first[:12] in listed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
@pytest.mark.parametrize("options", [["--json"], ["--topology", "/dev/full"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_told_in_a_line(options: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "openbook.cli", "plan", "--passages", "1000", *options]
    with Path("/dev/full").open("w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (1, f"openbook: {os.strerror(errno.ENOSPC)}\n")


def test_a_snapshot_is_built_of_given_vectors_as_its_options_say(tmp_path: Path) -> None:
    model = tiny_encoders.saved(tmp_path / "encoder", tiny_encoders.bert_model(), tiny_encoders.bert_tokenizer())
    documents, out = tmp_path / "documents.jsonl", tmp_path / "out"
    documents.write_text("".join(json.dumps({"id": str(i), "text": f"about {i}"}) + "\n" for i in range(40)))
    common = ["build", documents, "--encoder", model, "--threads", 1]
    openbook(*common, "--out", tmp_path / "encoded")
    vectors = np.load(Snapshot.open(tmp_path / "encoded").shard_folder(0) / "vectors.npy")
    np.save(tmp_path / "vectors.npy", vectors)
    options = ["--vectors", tmp_path / "vectors.npy", "--no-bm25", "--exact-dtype", "float16"]
    said = openbook(*common, "--out", out, "--factory", "HNSW8", "--recall", 0.9, *options)
    snapshot = Snapshot.open(out)
    manifest = snapshot.manifest
    assert said.endswith(f"{out}: snapshot {manifest.snapshot_id}, 40 passages in 1 shard\n")
    assert (manifest.factory, manifest.exact_dtype, manifest.embedded_by) == ("HNSW8", "float16", None)
    assert manifest.recall
    assert manifest.recall.at_10 >= 0.9
    stored = np.load(snapshot.shard_folder(0) / "vectors.npy")
    np.testing.assert_array_equal(stored, vectors.astype(np.float16))
    assert [(folder / bm25.FOLDER).exists() for folder in (tmp_path / "encoded", out)] == [True, False]
