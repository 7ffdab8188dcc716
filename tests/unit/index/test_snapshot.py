import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Passage
from openbook.errors import (
    DeadlineExceeded,
    InvalidConfig,
    InvalidDocuments,
    InvalidRequest,
    InvalidSnapshot,
    StartupError,
)
from openbook.index.building.build import build_snapshot, check_plan
from openbook.index.disk.snapshot import FILES, MANIFEST, SCAN_FILES, Manifest, Snapshot
from openbook.index.server import verify
from openbook.index.server.verify import Verifier
from openbook.index.shard import engine
from openbook.index.shard.shard import Shard

N, D = 60, 8
PASSAGES = [Passage(i, f"doc-{i // 4}", f"title {i}", f"text {i}") for i in range(N)]
VECTORS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)


def build(out: Path, vectors: Float32 = VECTORS, n_shards: int = 2, factory: str = "Flat", **more: Any) -> Manifest:
    passages = more.pop("passages", PASSAGES)
    return build_snapshot(passages, vectors, out, n_shards, factory, "hash", "hash-8", **more)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "snapshot"
    build(out)
    return out


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With all files that a snapshot can have."""
    out = tmp_path_factory.mktemp("scanned") / "snapshot"
    build(out, scan="int8")
    return out


@pytest.fixture
def copy(scanned: Path, tmp_path: Path) -> Path:
    """One of our own, to be damaged."""
    return Path(shutil.copytree(scanned, tmp_path / "snapshot"))


def test_a_snapshot_says_what_it_is(built: Path) -> None:
    manifest = Snapshot.open(built).manifest
    assert (manifest.n_passages, manifest.dimension, manifest.factory) == (N, D, "Flat")
    assert (manifest.encoder, manifest.encoder_fingerprint) == ("hash", "hash-8")
    assert [(shard.first_id, shard.n_passages) for shard in manifest.shards] == [(0, 30), (30, 30)]
    assert manifest.max_norm == pytest.approx(np.linalg.norm(VECTORS, axis=1).max())
    assert [path.name for path in built.parent.iterdir()] == ["snapshot"]


def test_equal_contents_have_equal_ids_and_others_have_others(built: Path, tmp_path: Path) -> None:
    first = Snapshot.open(built).manifest.snapshot_id
    assert build(tmp_path / "again").snapshot_id == first
    altered = VECTORS.copy()
    altered[7, 3] = np.nextafter(altered[7, 3], np.float32(np.inf))
    assert build(tmp_path / "altered", altered).snapshot_id != first
    assert build(tmp_path / "shards", n_shards=3).snapshot_id != first


def test_a_scan_adds_its_files_and_nothing_else(built: Path, scanned: Path) -> None:
    plain, more = (Snapshot.open(folder).manifest for folder in (built, scanned))
    assert plain.snapshot_id != more.snapshot_id
    for mine, theirs in zip(more.shards, plain.shards, strict=True):
        assert (mine.has_scan, theirs.has_scan) == (True, False)
        assert mine.files[: len(FILES)] == theirs.files
        assert [file.name for file in mine.files[len(FILES) :]] == list(SCAN_FILES)
    sizes = [file.size_bytes for file in more.shards[0].files[len(FILES) :]]
    assert sizes == [128 + 30 * D, 128 + 30 * 16, 128 + 4 * D]  # a header, and codes, scales, centre


def test_a_memory_map_in_any_layout_builds_the_same(built: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.asfortranarray(VECTORS))
    manifest = build(tmp_path / "mapped", np.load(tmp_path / "v.npy", mmap_mode="r"))
    assert manifest.snapshot_id == Snapshot.open(built).manifest.snapshot_id


def test_progress_is_told_to_the_end(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    build(tmp_path / "s", on_progress=lambda *about: told.append(about))
    assert told == [("write", 30, N), ("write", 60, N), ("index", 30, N), ("index", 60, N)]


BAD_VECTORS = VECTORS.copy()
BAD_VECTORS[41, 2] = np.inf


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"vectors": BAD_VECTORS}, InvalidDocuments, "NaN or infinity in row 41"),
        ({"vectors": 1e5 * VECTORS, "exact_dtype": "float16"}, InvalidDocuments, "finite in float16, got .* infinity"),
        ({"exact_dtype": "int8"}, InvalidConfig, "exact dtype must be float32 or float16, got 'int8'"),
        ({"vectors": VECTORS[:-1]}, InvalidDocuments, "60 passages, 59 vectors"),
        ({"vectors": VECTORS.astype(np.float64)}, InvalidDocuments, "float32 or float16, got .* float64"),
        ({"vectors": VECTORS[:0], "passages": []}, InvalidDocuments, "at least one passage"),
        ({"passages": PASSAGES[::-1]}, InvalidDocuments, "expected 0, got 59"),
        ({"n_shards": 0}, InvalidConfig, "n_shards must be at least 1, got 0"),
        ({"factory": "Flatt"}, InvalidConfig, "'Flatt': could not parse"),
        ({"factory": "LSH"}, InvalidConfig, "'LSH': .*METRIC_L2"),
        ({"factory": "HNSW0"}, InvalidConfig, "'HNSW0': numbers in it must be at least 1"),
        ({"factory": "IVF64,Flat"}, InvalidConfig, r"'IVF64,Flat': .*training points \(60\)"),
        ({"scan": "int4"}, InvalidConfig, "scan must be int8 or none, got 'int4'"),
        ({"scan": "int8", "factory": "HNSW8"}, InvalidConfig, "scan int8 is for the factory Flat alone, got 'HNSW8'"),
        ({"factory": "IDMap,Flat"}, InvalidConfig, "'IDMap,Flat': add does not make sense"),
    ],
)
def test_what_cannot_be_built_leaves_nothing_behind(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(tmp_path / "snapshot", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_is_never_overwritten(copy: Path) -> None:
    before = (copy / MANIFEST).read_bytes()
    with pytest.raises(InvalidConfig, match=f"{copy}: exists"):
        build(copy)
    assert (copy / MANIFEST).read_bytes() == before


def test_a_link_to_what_is_not_there_is_told_of_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("elsewhere")
    with pytest.raises(InvalidConfig, match="out: exists"):
        check_plan(tmp_path / "out", 1, "Flat", D)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", [*FILES, *SCAN_FILES])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, "sha256 must be [0-9a-f]{64}, found"),
        (truncate, r"must have \d+ bytes, found"),
        (Path.unlink, "No such"),
    ],
)
def test_a_damaged_file_is_named(copy: Path, name: str, damage: Callable[[Path], None], message: str) -> None:
    path = copy / "shard-0001" / name
    damage(path)
    with pytest.raises(InvalidSnapshot, match=f"{path}: .*{message}"):
        Shard(copy, 1)
    assert Shard(copy, 0).n_passages == 30  # the other shard is none the worse for it


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("apart_from", [0, 1 << 25])
def test_verifying_apart_finds_the_same(copy: Path, monkeypatch: pytest.MonkeyPatch, apart_from: int) -> None:
    monkeypatch.setattr(verify, "_APART_FROM", apart_from)
    Verifier().verify(copy, 0)
    path = copy / "shard-0000" / "vectors.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(InvalidSnapshot, match=r"vectors\.npy: was altered"):
        Verifier().verify(copy, 0)


@pytest.mark.usefixtures("hurried")
def test_verifying_apart_imports_nothing_that_lies_in_the_current_folder(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_APART_FROM", 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").write_text("raise SystemExit('somebody else')")
    Verifier().verify(copy, 0)


def test_what_verifying_apart_breaks_at_is_told_without_a_traceback(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_APART_FROM", 0)
    monkeypatch.setattr(verify, "_VERIFY", "raise MemoryError('no more')")
    with pytest.raises(InvalidSnapshot, match=r"^MemoryError: no more$"):
        Verifier().verify(copy, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 3}, "format_version: Input should be 1 or 2"),
        ({"dimension": 0}, "dimension: Input should be greater"),
        ({"colour": "red"}, "colour: Extra inputs"),
        ({"encoder_fingerprint": "other"}, "altered"),
    ],
)
def test_a_manifest_must_be_one_of_ours(copy: Path, change: dict[str, Any], message: str) -> None:
    path = copy / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidSnapshot, match=f"{path}: .*{message}"):
        Snapshot.open(copy)


def test_a_folder_that_is_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(InvalidSnapshot, match=r"not a snapshot: manifest.json: No such file"):
        Snapshot.open(tmp_path)
    (tmp_path / MANIFEST).write_bytes(b"\xff{")
    with pytest.raises(InvalidSnapshot, match=str(tmp_path)):
        Snapshot.open(tmp_path)


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_out_of_range(built: Path, shard: int) -> None:
    with pytest.raises(InvalidSnapshot, match=rf"shard must be 0\.\.1, got {shard}"):
        Shard(built, shard)


def test_a_query_whose_scores_could_overflow_is_refused(built: Path) -> None:
    shard = Shard(built, 0)
    queries = np.ones((2, D), np.float32)
    queries[1] = 3e38
    with pytest.raises(InvalidRequest, match=r"norms up to .* in row 1"):
        shard.search(queries, 1, Deadline.never())


def test_a_search_does_not_wait_for_its_turn_beyond_its_deadline(built: Path) -> None:
    shard = Shard(built, 0)
    with engine._Turn(Deadline.never(), 0), pytest.raises(DeadlineExceeded, match="turn"):
        shard.search(VECTORS[:1], 1, Deadline.after(0.01))


def test_two_builds_of_faiss_are_one_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.check_installation()
    wheel = tmp_path / "faiss_gpu-1.15.1.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("Metadata-Version: 2.1\nName: faiss-gpu\nVersion: 1.15.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(StartupError, match="found faiss-cpu and faiss-gpu:"):
        engine.check_installation()


@pytest.mark.parametrize(("module", "name"), [("faiss", "FAISS"), ("numba", "Numba")])
def test_what_is_not_installed_is_named(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(wanted: str) -> object:
        return None if wanted == module else object()

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    with pytest.raises(StartupError, match=f"{name} is not installed: pip install 'openbook"):
        engine.check_installation()


def test_the_server_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, openbook.index.server.server; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
