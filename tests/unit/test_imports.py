"""What must stay light stays light: looked at in a fresh process, where nothing was imported before."""

import importlib.util
import subprocess
import sys
from pathlib import Path

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


def test_a_build_whose_folder_is_there_is_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    command = f"['build', 'embedded', '--out', {str(tmp_path)!r}]"
    code = "import sys; from typer.testing import CliRunner; from openbook.cli import app; "
    code += f"print(CliRunner().invoke(app, {command}).exception, *({HEAVY!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}: exists; a snapshot is never changed, build another one\n"


def test_no_package_of_ours_brings_what_makes_ray_slow_to_start() -> None:
    assert importlib.util.find_spec("rfc3987_syntax") is None


TRACED = "openbook.rag.pipeline, openbook.index.client.sharded, openbook.index.server.server, openbook.cli"


def test_without_traces_nothing_of_opentelemetry_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBOOK_TRACE_FILE", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    code = f"import sys, {TRACED}; from openbook.tracing.spans import setup_tracing; setup_tracing('index-0'); "
    code += "print(*{name for name in sys.modules if name.startswith('opentelemetry')})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_traces_that_are_asked_for_need_it() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; import os; os.environ['OPENBOOK_TRACE_FILE'] = 'x'; "
    code += "from openbook.tracing.spans import setup_tracing; setup_tracing('index-0')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "and opentelemetry is not installed: pip install 'openbook[otel]'" in done.stderr
