"""Models on disk or on a hub: where they lie, whether they are whole, what identifies them.

A folder may hold an `openbook.json` beside transformers' own files, for what those cannot say: see `Declaration`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from openbook.config import ModelSettings
from openbook.core.fingerprint import json_digest
from openbook.errors import InvalidModel
from openbook.models.embedded import EMBEDDED

HUB_TIMEOUT_S = 5.0

PROBE = "Who wrote “Les Misérables” (1862)?  The naïve U.S.-based author's 3.14% — re-thought, 東京 42,000\n"
"""Two tokenizers of equal vocabulary that split this alike are taken for one: case, accents, spaces, punctuation."""


class Declaration(BaseModel):
    """`openbook.json`: what a checkpoint says of itself. All of it may be absent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    space: str | None = None  # of a query encoder: the fingerprint of the passage encoder that it was trained with
    input_format: Literal["rag", "pair"] | None = None  # of a generator: see `openbook.models.generator`
    max_tokens: int | None = Field(None, ge=16)  # of a generator: question and passage together
    legacy: bool | None = None  # of a generator: questions as old RAG checkpoints know them
    base: Literal["embedded"] | None = None  # of a generator: its tokenizer and frozen embeddings are those of this
    sha256: str | None = None  # of model.safetensors


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model lies."""

    name: str  # as the settings call it
    location: str  # a folder or a hub name
    local: bool  # read nothing that is not on this machine

    @classmethod
    def find(cls, name: str, embedded: Callable[[], Path]) -> "Source":
        """The model that comes with openbook, or a folder, or a hub name.

        The hub is asked once whether it has the model, and where it cannot be asked, what was downloaded before counts:
        transformers itself would try again for half a minute.

        Raises:
            InvalidModel: there is no such model.
        """
        if name == EMBEDDED:
            return cls(name, str(embedded()), local=True)
        if Path(name).is_dir():
            return cls(name, name, local=True)
        try:
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        except (RepositoryNotFoundError, HFValidationError):
            raise InvalidModel(f"model {name!r} is neither 'embedded', nor a folder, nor a model on the hub") from None
        except Exception as error:  # no network, offline mode, a hub in trouble
            source = cls(name, name, local=True)
            if source.json("config.json") is None:
                raise InvalidModel(
                    f"model {name!r} is neither 'embedded' nor a folder; should it be a model on the hub, it was never "
                    f"downloaded to this machine, and the hub does not answer: {_first_line(error)}"
                ) from None
            return source
        return cls(name, name, local=False)

    def json(self, filename: str) -> Any:
        """A JSON file's content; None where the model has no such file.

        Raises:
            InvalidModel: it is no JSON.
        """
        with self._explained(filename):
            path = cached_file(
                self.location,
                filename,
                local_files_only=self.local,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            return json.loads(Path(path).read_text(encoding="utf-8")) if path else None

    def declaration(self) -> Declaration:
        """`openbook.json`. Raises InvalidModel if it is not as it must be."""
        try:
            return Declaration.model_validate(self.json("openbook.json") or {})
        except ValidationError as error:
            raise InvalidModel(f"model {self.name!r}: openbook.json: {error}") from None

    def config(self) -> Any:
        """transformers' config. Raises InvalidModel."""
        with self._explained("config"):
            return AutoConfig.from_pretrained(self.location, local_files_only=self.local)

    def tokenizer(self, subfolder: str = "") -> Any:
        """transformers' tokenizer. Raises InvalidModel."""
        with self._explained("tokenizer"):
            return AutoTokenizer.from_pretrained(self.location, subfolder=subfolder, local_files_only=self.local)

    def model(self, kind: Any, **options: Any) -> Any:
        """A model of a transformers class, in float32, all of its weights out of the checkpoint.

        Raises:
            InvalidModel: it cannot be read, or lacks weights, which transformers would make up at random.
        """
        with self._explained("weights"):
            model, report = kind.from_pretrained(
                self.location, local_files_only=self.local, dtype=torch.float32, output_loading_info=True, **options
            )
        # A pooler is often absent, and what needs one is not loaded that way.
        missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
        if missing:
            raise InvalidModel(f"model {self.name!r}: {len(missing)} weights are missing, first of them {missing[0]}")
        return model

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """transformers raises errors of every kind here, and draws progress bars that belong in no log."""
        shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        try:
            yield
        except Exception as error:
            raise InvalidModel(f"model {self.name!r}: cannot load its {what}: {_first_line(error)}") from error
        finally:
            transformers_logging.set_verbosity(verbosity)
            if shown:
                transformers_logging.enable_progress_bar()


def place(model: Any, settings: ModelSettings) -> Any:
    """The model ready to compute: device, dtype, evaluation mode. The number of threads is the whole process's.

    Raises:
        InvalidModel: there is no such device.
    """
    torch.set_num_threads(settings.n_threads)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return model.eval().requires_grad_(False).to(device=device, dtype=getattr(torch, settings.dtype))
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise InvalidModel(f"device {settings.device!r} cannot be used: {_first_line(error)}") from None


def weights_digest(model: Any) -> str:
    """Digest of all weights by name, as float32: the same whatever file format they are stored in."""
    seen: set[int] = set()
    digests = {}
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() not in seen:  # tied weights count once
            seen.add(tensor.data_ptr())
            digests[name] = [list(tensor.shape), hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()]
    return json_digest(digests)


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of the vocabulary and of how it splits text: tokenizer files change with the library that writes them."""
    return json_digest([tokenizer.get_vocab(), tokenizer(PROBE)["input_ids"]])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
