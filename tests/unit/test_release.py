"""What `make release` holds a release to."""

from pathlib import Path

import pytest
import yaml
from scripts import load_script
from typer.testing import CliRunner

import openbook
from openbook.cli import app

ROOT = Path(__file__).parents[2]
release = load_script(ROOT / "deploy" / "release.py")

CHANGELOG = "# Changelog\n\n## Unreleased\n\n- b\n\n## 0.2.0 (2026-12-01)\n\n- a\n  more\n\n## 0.1.0\n\n- first\n"


@pytest.mark.parametrize(("version", "text"), [("0.2.0", "- a\n  more"), ("0.1.0", "- first"), ("0.3.0", "- b")])
def test_notes_are_the_section_of_the_version_or_what_is_unreleased(version: str, text: str) -> None:
    assert release.notes(CHANGELOG, version) == f"# openbook {version}\n\n{text}\n"


def test_a_version_about_which_nothing_is_said_is_no_release() -> None:
    with pytest.raises(ValueError, match=r"0\.3\.0"):
        release.notes("# Changelog\n\n## Unreleased\n\n## 0.2.0\n\n- a\n", "0.3.0")
    assert release.notes((ROOT / "CHANGELOG.md").read_text(), openbook.__version__).count("\n") > 3


def test_a_wheel_with_a_file_too_few_or_too_many_is_noticed() -> None:
    package = ROOT / "services"
    names = [
        str(path.relative_to(package)) for path in (package / "openbook").rglob("*") if "__pycache__" not in str(path)
    ]
    assert release.missing(names) == []
    assert release.missing([name for name in names if "reader" not in name]) == [
        "openbook/embedded/reader/confidence.json",
        "openbook/embedded/reader/model.safetensors",
    ]
    assert release.strange([*names, "openbook-0.1.0.dist-info/METADATA"]) == []
    assert len(release.strange(["tests/x.py", "openbook/__pycache__/x.pyc", "openbookish/x.py"])) == 3


def test_keys_that_lie_beside_what_is_released_are_noticed() -> None:
    names = ["deploy/secrets.sh", "deploy/secrets/.gitignore", "deploy/secrets/ray-token", "deploy/secrets-ca/ca.key"]
    assert release.secret(f"openbook-0.1.0/{name}" for name in [*names, "x/cert.pem"]) == [
        "openbook-0.1.0/deploy/secrets/ray-token",
        "openbook-0.1.0/deploy/secrets-ca/ca.key",
        "openbook-0.1.0/x/cert.pem",
    ]


def test_the_version_is_said_once() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{openbook.__version__}\n"
    images = yaml.safe_load((ROOT / "deploy" / "topology.yaml").read_text())["kubernetes"]
    assert {images[name].rsplit(":")[-1] for name in ("image", "index_image")} == {openbook.__version__}
