"""How far a build has come, whatever the order in which its steps are done."""

import errno
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.splitting import Splitting
from openbook.corpus.sources.parse import reason
from openbook.corpus.work import (
    FAILURES,
    NOTE,
    Note,
    Plan,
    folder_of,
    left,
    remove_if_done,
    resumed,
    set_aside,
    told_if_full,
)
from openbook.errors import InvalidConfig, StartupError
from openbook.index.building.build import LOCK, undisturbed
from openbook.index.disk.snapshot import MANIFEST

PLAN = Plan(
    documents_digest="",
    splitting=Splitting(2),
    fields=(),
    embedded_by="",
    dimension=1,
    vectors=None,
    former=None,
    duplicates="keep",
)


def test_where_we_are_has_its_folder_of_work_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert folder_of(Path()) == tmp_path / "here.work"


FILES = ("passages.bin", "offsets.npy", "vectors.npy", "rows.npy", "failures.jsonl")


@given(n_rows=st.integers(0, 40), n_together=st.integers(1, 9), data=st.data())
def test_what_is_left_is_what_is_not_done(n_rows: int, n_together: int, data: st.DataObject) -> None:
    note = Note(plan=PLAN)
    steps = note.steps_left(n_rows, n_together)
    assert [row for step in steps for row in step] == list(range(n_rows))
    order = data.draw(st.permutations(steps))
    n_done = data.draw(st.integers(0, len(order)))
    for step in order[:n_done]:
        note.add(step)
    note = Note.model_validate_json(note.model_dump_json())
    assert note.n_done == sum(map(len, order[:n_done]))
    assert note.steps_left(n_rows, n_together) == sorted(order[n_done:], key=lambda step: step.start)
    left = note.steps_left(n_rows, data.draw(st.integers(1, 9)))
    assert [row for step in left for row in step] == sorted(row for step in order[n_done:] for row in step)
    for step in left:
        note.add(step)
    assert (note.n_encoded, note.n_done) == (n_rows, n_rows)


def test_only_the_same_plan_goes_on(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).touch()
    assert resumed(tmp_path, PLAN, "float32") is None
    Note(plan=PLAN, n_encoded=3, ahead={5: 7}).write(tmp_path)
    assert resumed(tmp_path, PLAN, "float32") == Note(plan=PLAN, n_encoded=3, ahead={5: 7})
    for other in (Splitting(3), Splitting(2, "tokens"), Splitting(2, at="sentences"), Splitting(2, overlap=1)):
        assert resumed(tmp_path, PLAN.model_copy(update={"splitting": other}), "float32") is None
    for damaged in (b"{", b"\xff"):
        (tmp_path / NOTE).write_bytes(damaged)
        assert resumed(tmp_path, PLAN, "float32") is None


def test_of_files_that_are_not_all_there_nothing_is_kept(tmp_path: Path) -> None:
    Note(plan=PLAN).write(tmp_path)
    set_aside(tmp_path, PLAN, "float32")
    assert left(tmp_path, PLAN, "float32") is None


def test_a_build_begins_anew_where_a_library_is_there_that_was_missing(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).touch()
    Note(plan=PLAN).write(tmp_path)
    for name, goes_on in (("pypdf.none_such", True), ("pypdf", False)):
        reasons = ("a link", reason(ModuleNotFoundError(name=name)))
        (tmp_path / FAILURES).write_text("".join(json.dumps({"path": "a", "reason": why}) + "\n" for why in reasons))
        assert (resumed(tmp_path, PLAN, "float32") is not None) == goes_on


def test_what_is_done_is_removed_by_who_is_alone_there(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "out.work"
    for folder, name in ((out, MANIFEST), (out, LOCK), (work, NOTE)):
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
    with undisturbed(work):
        with pytest.raises(InvalidConfig, match=r"out\.work: another process is at work here"):
            remove_if_done(out)
        assert sorted(path.name for path in (*out.iterdir(), *work.iterdir())) == [LOCK, LOCK, MANIFEST, NOTE]
    remove_if_done(out)
    assert [path.name for path in (*tmp_path.iterdir(), *out.iterdir())] == ["out", MANIFEST]


def test_a_full_disk_is_one_line_however_it_is_said(tmp_path: Path) -> None:
    for error in (OSError(errno.EDQUOT, "No space left on device"), OSError("9 requested and 4 written")):
        with (
            pytest.raises(StartupError, match=f"^{tmp_path}: cannot go on: No space left on device; "),
            told_if_full(tmp_path),
        ):
            raise error
    with pytest.raises(PermissionError), told_if_full(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")
