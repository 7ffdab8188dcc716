"""Files that are whole or not there, whoever is killed and whenever the power is cut; and one writer at a time."""

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from pathlib import Path

from openbook.errors import InvalidConfig, StartupError

POLL_S = 0.1
MORE_ROOM = "with more room the same command does"


def at_home(path: Path | str) -> Path:
    """With `~` as whose home it is; where nobody has that name, it is the file's own."""
    return Path(os.path.expanduser(path))  # Path's own raises RuntimeError there


def write(path: Path, text: str) -> None:
    """Replace a file's content: there is what it had or all of the new, and the new when this returns.

    Who may read it stays the same. By one writer at a time. Raises OSError: the file is as it was.
    """
    partial = partial_of(path)
    try:
        with partial.open("w", encoding="utf-8") as file:
            _keep_access(path, file.fileno())  # before the text is there for others to read
            file.write(text)
        put(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def why_full(error: Exception) -> str | None:
    """What an error says of a disk that takes no more; None of another error."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if not isinstance(error, OSError):  # safetensors and tokenizers say it as Rust does
        of_rust = re.search(r"\(os error (\d+)\)", str(error))
        return os.strerror(int(of_rust[1])) if of_rust and int(of_rust[1]) in full else None
    if error.errno is None and " requested and " in str(error):  # NumPy wrote less, and does not say why
        return os.strerror(errno.ENOSPC)
    return error.strerror if error.errno in full else None


@contextmanager
def told_if_full(place: Path, make_room: Callable[[], str] = lambda: MORE_ROOM) -> Iterator[None]:
    """Raises StartupError, after which nobody tries again: there is no room for what the body writes. It says what is
    to be done, once `make_room` has done what it can.
    """
    try:
        yield
    except Exception as error:
        if (why := why_full(error)) is None:
            raise
        raise StartupError(f"{place}: cannot go on: {why}; {make_room()}") from None


def check_place(path: Path) -> None:
    """Before long work. Raises InvalidConfig: no file can be written there."""
    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        raise InvalidConfig(f"{path}: must be a file in a folder that exists")
    try:
        partial_of(path).touch()
        partial_of(path).unlink()
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be written: {error.strerror}") from None


def _keep_access(former: Path, descriptor: int) -> None:
    """Mode, owner and group of the file that is replaced: its readers are often not who writes it."""
    try:
        found = former.stat()
    except FileNotFoundError:
        return
    os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
    for owner, group in ((-1, found.st_gid), (found.st_uid, -1)):
        with suppress(OSError):  # root may give files away; others only to their own groups
            os.fchown(descriptor, owner, group)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a file that somebody else may have put there: no pipe that would keep us waiting, no link to
    elsewhere, no more than so many bytes.

    Raises:
        OSError: it cannot be read, or is no such file.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"must have at most {max_bytes} bytes, found {found.st_size}", str(path))
        return file.read(max_bytes)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes its name at the end of the body, where nothing may have it by then.

    Where the body fails, it goes; what a killed writer left unfinished is removed. By one writer at a time.
    """
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        put(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def partial_of(path: Path) -> Path:
    """Where a file or a folder is written before it takes its name: beside it, hidden."""
    return path.with_name(f".{path.name}.partial")


def beside(path: Path, name: str) -> Path:
    """What is called after a file or a folder and lies beside it: `{}` in the name is its own, which "." has too."""
    path = path.absolute()
    return path.with_name(name.format(path.name))


def put(partial: Path, path: Path) -> None:
    """Give a complete file or folder its name: not before all in it is safe, and then the name is safe too."""
    sync(partial)
    partial.rename(path)
    _fsync(path.parent)


def sync(path: Path) -> None:
    """Make a file, or a folder with all in it, safe from a power cut."""
    for each in (*path.rglob("*"), path):
        _fsync(each)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(lock: Path, timeout_s: float = inf) -> Iterator[None]:
    """As long as no other process of this machine does, by a lock on a file. A killed one's is free once it has ended.

    Raises:
        InvalidConfig: another one still holds it after `timeout_s`.
        OSError: the file cannot be opened.
    """
    give_up = time.monotonic() + timeout_s
    with lock.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if timeout_s == inf else fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise InvalidConfig(f"{lock.parent}: another process is at work here") from None
                time.sleep(POLL_S)
        yield


def is_locked(lock: Path) -> bool | None:
    """Whether somebody has `locked` it; None where that cannot be told. It may be asked by many at once."""
    try:
        with _held(lock, fcntl.LOCK_SH):  # on NFS who may only read gets no other
            return False
    except BlockingIOError:
        return True
    except OSError:
        return None


@contextmanager
def temporary_folder(prefix: str, place: Path | None = None) -> Iterator[Path]:
    """A folder for this process, gone at the end of the body, where temporary files are unless it is said otherwise.
    What killed processes left behind goes first.

    Whose process lives is told by a lock on the folder, which it has before it has its name. systemd-tmpfiles too takes
    it for a sign of life: else it would remove, after days, what has not changed.
    """
    place = place or Path(tempfile.gettempdir())
    for former in place.glob(f"{prefix}*"):
        with suppress(OSError), ExitStack() as stack:  # in use, somebody else's, or gone already
            for held in (former, *former.glob("lock")):  # former versions hold a file in it
                stack.enter_context(_held(held))
            shutil.rmtree(former)
    hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=place))
    folder = hidden.with_name(hidden.name.removeprefix("."))
    try:
        with ExitStack() as stack:
            with suppress(OSError):  # no locks on folders here (NFS): who sweeps gets none either, and leaves it
                stack.enter_context(_held(hidden))
            hidden.rename(folder)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _held(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """By a lock on a file or a folder that is there. Raises OSError: another process has it, or it cannot be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would keep us waiting
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
