"""What a power cut may leave follows from the order of calls; a kill cannot show it: the page cache outlives it."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO

import pytest

from openbook import files
from openbook.errors import InvalidConfig


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is made safe and what is named, in this order, by path within the test's folder."""
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))

    def noted_rename(self: Path, target: Path) -> Path:
        calls.append(f"{self.relative_to(tmp_path)} -> {target.relative_to(tmp_path)}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    return calls


def test_a_file_is_safe_before_it_has_its_name_and_its_name_before_we_go_on(tmp_path: Path, calls: list[str]) -> None:
    path = tmp_path / "note"
    for text in ("é", "another"):
        files.write(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert calls == [".note.partial", ".note.partial -> note", "."] * 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_safe_with_all_in_it_before_it_has_its_name(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "left").touch()  # by one that was killed
    with files.new_folder(tmp_path / "new") as folder:
        assert list(folder.iterdir()) == []
        (folder / "a").touch()
        (folder / "inner").mkdir()
        (folder / "inner" / "b").touch()
        assert not (tmp_path / "new").exists()
    *synced, named, last = calls
    assert sorted(synced) == [".new.partial", ".new.partial/a", ".new.partial/inner", ".new.partial/inner/b"]
    assert (named, last) == (".new.partial -> new", ".")
    assert (tmp_path / "new" / "inner" / "b").exists()


def test_what_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    files.write(tmp_path / "note", "former")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(tmp_path / "note", "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"note": "former"}
    with pytest.raises(OSError, match="No space left"), files.new_folder(tmp_path / "new") as folder:
        (folder / "a").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["note"], "nobody can use what was not finished"


def test_where_no_file_can_be_written_is_told_before(tmp_path: Path) -> None:
    for place, why in (("", "file in a folder"), ("none/a", "file in a folder"), ("r" * 250, "name too long")):
        with pytest.raises(InvalidConfig, match=why):
            files.check_place(tmp_path / place)
    with pytest.raises(InvalidConfig, match="must be a file in a folder that exists"):
        files.check_place(Path(os.devnull))  # else it would be replaced
    (tmp_path / "note").write_text("former")
    files.check_place(tmp_path / "note")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["former"]


@pytest.mark.parametrize("may_give_away", [True, False])
def test_who_may_read_a_file_may_read_it_after_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_give_away: bool
) -> None:
    def refused(descriptor: int, owner: int, group: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = tmp_path / "note"
    path.touch()
    if not may_give_away:
        monkeypatch.setattr(os, "fchown", refused)
    elif os.geteuid() == 0:
        os.chown(path, 1234, 5678)
    former_umask = os.umask(0o077)
    try:
        for mode in (0o644, 0o640, 0o600):
            path.chmod(mode)
            before = path.stat()
            files.write(path, f"{mode}")
            after = path.stat()
            assert path.read_text() == f"{mode}"
            assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
        files.write(tmp_path / "new", "")
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(former_umask)


def test_a_lock_is_held_by_one_and_free_when_it_is_let_go(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    for timeout_s in (0.0, 0.2):
        with (
            files.locked(lock, 0),
            pytest.raises(InvalidConfig, match=f"{tmp_path}: another process is at work here"),
            files.locked(lock, timeout_s),
        ):
            pass
    with files.locked(lock):
        pass


def test_who_may_only_read_a_lock_sees_whether_it_is_held_or_that_it_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def as_on_nfs(file: TextIO | int, how: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        if how & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    lock, another = tmp_path / "lock", tmp_path / "another"
    with files.locked(lock):
        assert files.is_locked(lock) is True
    with lock.open() as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        assert files.is_locked(lock) is False, "two may look at once"
    another.symlink_to(lock)  # cannot be opened, as one of another user
    assert files.is_locked(another) is None


def test_a_temporary_folder_goes_at_the_end_and_those_of_the_killed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    hold = "from openbook.files import temporary_folder as t\nwith t('x-') as f: print(f, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1, text=True) as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
        (left / "inner").mkdir()
        with files.temporary_folder("x-") as mine, files.temporary_folder("x-") as another:
            assert {path.name for path in tmp_path.iterdir()} == {left.name, mine.name, another.name}
        killed.kill()
    assert list(tmp_path.iterdir()) == [left]
    with files.temporary_folder("x-") as mine:
        assert list(tmp_path.iterdir()) == [mine]
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_in_use_is_locked_itself_as_those_who_age_folders_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd-tmpfiles leaves a folder alone, with all in it, whose lock it does not get."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with files.temporary_folder("x-") as mine:
        assert list(mine.iterdir()) == []
        descriptor = os.open(mine, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)


def test_folders_of_former_versions_go_once_nobody_holds_the_file_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("x-left", "x-used"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    with files.locked(tmp_path / "x-used" / "lock"), files.temporary_folder("x-") as mine:
        assert {path.name for path in tmp_path.iterdir()} == {"x-used", mine.name}
    with files.temporary_folder("x-") as mine:
        assert list(tmp_path.iterdir()) == [mine]
