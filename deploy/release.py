"""A release into a folder: wheel, sdist, notes, what it consists of, checksums.

    python deploy/release.py [--out dist]

Wheel and sdist are built, and the wheel is held to what it must contain. Then it is installed with the extra `demo`
into a fresh environment, and `openbook demo` is run there, from a folder that has nothing of this one. What was
installed is the SBOM, in CycloneDX's format. The notes are the version's section of CHANGELOG.md, or what is unreleased
while it has none. The version is openbook.__version__, alone.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "deploy" / "constraints-cpu.txt"
NEEDED = (
    "openbook/py.typed",
    "openbook/v1/answer_pb2.py",
    "openbook/v1/answer_pb2.pyi",
    "openbook/v1/index_pb2_grpc.py",
    "openbook/embedded/corpus/documents.jsonl.gz",
    "openbook/embedded/query_encoder/model.safetensors",
    "openbook/embedded/reader/model.safetensors",
    "openbook/embedded/reader/confidence.json",
    "openbook/serving/page/index.html",
    "openbook/serving/page/page.js",
    "openbook/experiments/data/README.md",
)
"""What is not found by importing it, and would be missed by users first."""


def notes(changelog: str, version: str) -> str:
    """Of a version: its section, else that of what is unreleased. Raises ValueError: there is neither."""
    parts = re.split(r"^## (.*)\n", changelog, flags=re.MULTILINE)
    sections = {
        title.split()[0].strip("[]"): text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    found = sections.get(version) or sections.get("Unreleased")
    if not found:
        raise ValueError(f"CHANGELOG.md has neither a section {version} nor anything unreleased")
    return f"# openbook {version}\n\n{found}\n"


def missing(names: Iterable[str]) -> list[str]:
    """What a wheel of these files lacks."""
    return sorted(set(NEEDED) - set(names))


def strange(names: Iterable[str]) -> list[str]:
    """What a wheel of these files should not have: caches, and whatever lies outside the package."""
    return [name for name in names if "__pycache__" in name or not re.match(r"openbook(-[^/]*\.dist-info)?/", name)]


def secret(names: Iterable[str]) -> list[str]:
    """What an sdist of these files would tell everybody: `deploy/secrets.sh` makes it beside what is released."""
    return [name for name in names if re.search(r"/secrets(-ca)?/(?!\.gitignore$).|\.(pem|key)$", name)]


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> None:
    """Show it, do it."""
    print("$", *(Path(part).name if isinstance(part, Path) else part for part in command), flush=True)
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([str(part) for part in command], cwd=cwd, env={**outside, **env}, check=True)


def release(out: Path) -> None:
    """All of it."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out)
    (wheel,) = out.glob("*.whl")
    version = wheel.name.split("-")[1]
    names = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(next(out.glob("*.tar.gz"))) as sdist:
        told = secret(sdist.getnames())
    if wrong := [*missing(names), *strange(names), *told]:
        raise SystemExit(f"{out}: missing, strange or secret: {', '.join(wrong)}")
    text = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    (out / "NOTES.md").write_text(text, encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        program = folder / "venv" / "bin"
        # torch first, by itself: an open range would bring CUDA.
        run(program / "pip", "install", "-q", "-c", CONSTRAINTS, "torch")
        run(program / "pip", "install", "-q", "-c", CONSTRAINTS, f"{wheel}[demo]")
        run(program / "openbook", "--version", cwd=folder)
        run(program / "openbook", "demo", cwd=folder)
        sbom = out / f"openbook-{version}.cdx.json"
        # In an environment of its own: with what it needs each process of Ray's takes seconds longer to start.
        venv.create(folder / "reader", with_pip=True)
        run(folder / "reader/bin/pip", "install", "-q", "cyclonedx-bom>=7.0")
        about = ("--pyproject", ROOT / "pyproject.toml", "--mc-type", "application", "--output-reproducible")
        run(folder / "reader/bin/cyclonedx-py", "environment", *about, "--output-file", sbom, program / "python")
    described = json.loads(sbom.read_text(encoding="utf-8"))
    described["metadata"]["component"]["version"] = version  # which pyproject.toml does not say
    sbom.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copy(CONSTRAINTS, out)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(lines))
    print("".join(lines), end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    release(parser.parse_args().out.resolve())


if __name__ == "__main__":
    main()
