"""What `make` makes anew, and leaves when it fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[2] / "Makefile"
WITHOUT_ENSUREPIP = """\
#!/bin/sh
test "$1" = -m || exit 0
mkdir -p "$3/bin" && touch "$3/bin/python"
exit 1
"""


pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="no make")


def test_an_environment_that_could_not_be_made_is_made_again(tmp_path: Path) -> None:
    """As Python leaves one on Debian without python3-venv: with a Python, and no pip."""
    python, made = tmp_path / "python3", tmp_path / "venv"
    python.write_text(WITHOUT_ENSUREPIP)
    python.chmod(0o700)
    command = ["make", "-f", str(MAKEFILE), f"PYTHON={python}", f"VENV={made}", f"{made}/bin/python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert not made.exists()


def test_a_snapshot_that_is_older_than_the_environment_is_taken(tmp_path: Path) -> None:
    in_order = ("var/demo/snapshot", "pyproject.toml", "deploy/constraints-cpu.txt", ".venv/bin/python")
    for age, name in enumerate((*in_order, ".venv/.demo", ".venv/.dev")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    command = ["make", "-f", str(MAKEFILE), "--question", "var/demo/snapshot"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
