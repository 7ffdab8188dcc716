"""Machine code is kept where it can be, and nothing depends on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
from openbook.index.shard.compiled import compiled

@compiled()
def _twice(x):
    return 2 * x

@compiled("int64(int64)")
def four_times(x):
    return _twice(_twice(x))
"""


def four_times_three(folder: Path) -> str:
    """In a process of its own."""
    code = "import module; print(module.four_times(3), len(module.four_times.stats.cache_hits))"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "module.py").write_text(SOURCE)
    return tmp_path


def test_the_second_process_finds_it_and_a_damaged_one_is_made_again(folder: Path) -> None:
    assert four_times_three(folder) == "12 0"
    assert four_times_three(folder) == "12 1"
    for kept in (folder / "cache").rglob("*.nb[ic]"):
        kept.write_bytes(b"")
    assert four_times_three(folder) == "12 0"


def test_where_it_cannot_be_kept_it_is_made_every_time(folder: Path) -> None:
    (folder / "cache").write_text("no folder")
    assert four_times_three(folder) == "12 0"


FETCHING = """
import numpy as np
from openbook.index.shard import compiled

{change}

@compiled.compiled("float64(float64[::1])")
def total(x):
    total = 0.0
    for i in range(len(x)):
        compiled.prefetch(x, i + 8)
        total += x[i]
    return total

@compiled.compiled("float64(float64[::1])")
def half(x):
    compiled.prefetch(x, 0)
    return total(x) / 2

@compiled.compiled("UniTuple(int64, 2)(int16[::1], int8[::1])")
def product(p, c):
    total, done = compiled.dot(p, c)
    for i in range(done, len(p)):
        total += int(p[i]) * int(c[i])
    return total, done

assert half(np.arange(5.0)) == 5.0
random = np.random.default_rng(0)
for n in (0, 1, 127, 128, 129, 384, 768, 4095, 4096):
    p, c = random.integers(-4000, 4001, n, np.int16), random.integers(-127, 128, n, np.int8)
    assert product(p, c)[0] == int(p.astype(int) @ c.astype(int))
    assert product(p, c)[1] == (n // compiled.BLOCK * compiled.BLOCK if compiled._writes_code else 0)
print("prefetch" in next(iter(total.inspect_asm().values())))
"""


@pytest.mark.parametrize(
    ("change", "fetches"),
    [
        ("", True),
        ("compiled._write_prefetch = lambda *_: 1 / 0", False),  # a function that is gone
        ("compiled.INTRINSIC = 'llvm.ceil.f32'", False),  # one that takes something else
    ],
)
def test_where_numba_has_become_another_nothing_is_fetched_ahead(tmp_path: Path, change: str, fetches: bool) -> None:
    code = FETCHING.format(change=change)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{fetches}\n"), done.stderr
    assert done.stderr.count("nothing is fetched before its turn") == (0 if fetches else 1)


def test_what_is_compiled_stays_within_its_arrays(tmp_path: Path) -> None:
    """Compiled code does not look where it reads, unless it is told to."""
    names = "test_rescoring.py", "test_inverted.py", "test_scan.py::test_all_of_the_best_are_contenders"
    tests = [str(Path(__file__).with_name(name)) for name in names]
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    options += ["-k", "not -1-float and not -40-float"]  # how large numbers are changes nothing of where they lie
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
