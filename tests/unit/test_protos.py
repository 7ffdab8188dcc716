"""The committed code is what protos/ says today."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "services/openbook/v1"


def test_who_works_on_it_gets_the_tools_that_generated_the_committed_code() -> None:
    """Others, as the next version of them, would generate other bytes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    generated_by = re.search(r"GRPC_GENERATED_VERSION = '(.*)'", (GENERATED / "index_pb2_grpc.py").read_text())
    assert generated_by
    tools = project["optional-dependencies"]["dev"]
    assert f"grpcio-tools=={generated_by[1]}" in tools
    assert any(each.startswith("mypy-protobuf==") for each in tools), "which does not write its version into its files"


def test_generated_code_has_not_drifted(tmp_path: Path) -> None:
    protos = sorted(path.relative_to(ROOT / "protos").as_posix() for path in (ROOT / "protos").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *protos],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "openbook/v1").iterdir()}
    committed = {path.name: path.read_text() for path in GENERATED.glob("*_pb2*")}
    assert fresh == committed, "run `make protos` and commit the result"


def test_the_package_asks_for_what_the_committed_code_needs() -> None:
    """It raises when it is imported beside older ones."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    grpc_version = re.search(r"GRPC_GENERATED_VERSION = '(.*)'", (GENERATED / "index_pb2_grpc.py").read_text())
    protobuf_version = re.search(r"# Protobuf Python Version: (.*)", (GENERATED / "index_pb2.py").read_text())
    assert grpc_version
    assert protobuf_version
    assert {f"grpcio>={grpc_version[1]}", f"protobuf>={protobuf_version[1]}"} <= set(wanted)
