"""What must stay light stays light: looked at in a fresh process, where nothing was imported before."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "ray", "faiss", "numba", "fastapi"}


@pytest.mark.parametrize(
    "module",
    [
        "openbook.cli",
        "openbook.client",
        "openbook.rag.pipeline",
        "openbook.config",
        "openbook.index.client.sharded",
        "openbook.loadtest.run",
    ],
)
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
