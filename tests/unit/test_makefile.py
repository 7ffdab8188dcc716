"""What `make` leaves when it fails."""

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


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_an_environment_that_could_not_be_made_is_made_again(tmp_path: Path) -> None:
    """As Python leaves one on Debian without python3-venv: with a Python, and no pip."""
    python, made = tmp_path / "python3", tmp_path / "venv"
    python.write_text(WITHOUT_ENSUREPIP)
    python.chmod(0o700)
    command = ["make", "-f", str(MAKEFILE), f"PYTHON={python}", f"VENV={made}", f"{made}/bin/python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert not made.exists()
