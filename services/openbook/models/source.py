"""Models on disk or on a hub: where they lie, whether they are whole, what identifies them.

A folder may hold an `openbook.json` beside transformers' own files, for what those cannot say: see `Declaration`. Its
keys may also stand in `config.json` under "openbook", where they survive transformers' own `save_pretrained`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from openbook.core.fingerprint import json_digest
from openbook.errors import InvalidModel
from openbook.models.embedded import EMBEDDED, WEIGHTS, verify

HUB_TIMEOUT_S = 5.0
REASONS = 400
"""So many characters of an error that lists them."""

PROBE = "Who wrote “Les Misérables” (1862)?  The naïve U.S.-based author's 3.14% — re-thought, 東京 42,000\n"
"""Two tokenizers of equal vocabulary that split this alike are taken for one: case, accents, spaces, punctuation."""


class Declaration(BaseModel):
    """What a checkpoint says of itself: `openbook.json`, or "openbook" in `config.json`. All of it may be absent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Of a query encoder: the fingerprint of the passage encoder that it was trained with.
    space: str | None = None
    # Of a sentence encoder: the inverse of the temperature it was trained with.
    query_scale: float | None = Field(None, gt=0, allow_inf_nan=False)
    # Of a generator: how it reads a question with a passage (`openbook.models.formats`), and how much of them together.
    input_format: Literal["rag", "pair"] | None = None
    max_tokens: int | None = Field(None, ge=8)
    legacy: bool | None = None
    # Of a generator in RAG's layout, which has no place for all of them: special tokens of its generation config.
    generation: dict[str, int | list[int]] | None = None
    # Stored is only what differs from the embedded encoder. Of a query encoder: the weights that were trained. Of a
    # generator, BERT to BERT on it: all but its tokenizer and its frozen embeddings.
    base: Literal["embedded"] | None = None
    decoder_layers: int = Field(1, ge=1)
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
            raise InvalidModel(
                f"model {name!r} is neither 'embedded', nor a folder, nor a model on the hub that may be read"
            ) from None
        except Exception as error:  # no network, offline mode, a hub in trouble
            source = cls(name, name, local=True)
            if source.json("config.json") is None:
                raise InvalidModel(
                    f"model {name!r} is neither 'embedded' nor a folder; should it be a model on the hub, it was never "
                    f"downloaded to this machine, and the hub does not answer: {first_line(error)}"
                ) from None
            return source
        return cls(name, name, local=False)

    def file(self, filename: str) -> Path | None:
        """Where a file lies on this machine, downloaded if need be; None where the model has no such file.

        Raises:
            InvalidModel: it cannot be downloaded.
        """
        with self.explained(filename):
            path = cached_file(
                self.location, filename, local_files_only=self.local, _raise_exceptions_for_missing_entries=False
            )
        return Path(path) if path else None

    def json(self, filename: str) -> Any:
        """A JSON file's content; None where the model has no such file. Raises InvalidModel if it is no JSON."""
        path = self.file(filename)
        with self.explained(filename):
            return json.loads(path.read_text(encoding="utf-8")) if path else None

    def declaration(self) -> Declaration:
        """What is declared, `openbook.json` before `config.json`, and the weights are those that it declares.

        Raises:
            InvalidModel: it is not as it must be, or the weights were altered.
        """
        config = self.json("config.json")
        parts = {"config.json": config.get("openbook") if isinstance(config, dict) else None}
        parts["openbook.json"] = self.json("openbook.json")
        declared = Declaration.model_validate({})
        for filename, part in parts.items():
            try:
                own = Declaration.model_validate(part or {})
            except ValidationError as error:
                raise InvalidModel(f"model {self.name!r}: {filename}: {error}") from None
            declared = declared.model_copy(update=own.model_dump(exclude_unset=True))
        if declared.sha256:
            verify(self.file(WEIGHTS) or Path(self.location) / WEIGHTS, declared.sha256)
        return declared

    def config(self) -> Any:
        """transformers' config. Raises InvalidModel."""
        with self.explained("config"):
            return AutoConfig.from_pretrained(self.location, local_files_only=self.local)

    def tokenizer(self, subfolder: str = "", config: Any = None) -> Any:
        """transformers' tokenizer. Files of 2020, older than tokenizer.json, do not say whose it is: of those in a
        subfolder the config of the model that reads it does.

        Raises:
            InvalidModel: it cannot be loaded.
        """
        options = {"subfolder": subfolder, "local_files_only": self.local}
        if config is not None and self.file(f"{subfolder}/tokenizer.json") is None:
            options["config"] = config
        with self.explained("tokenizer"):
            return AutoTokenizer.from_pretrained(self.location, **options)

    def check_ids(self, tokenizer: Any, model: Any, *used: int) -> None:
        """Texts get only ids that the model knows: one that it does not know would fail all that are computed with it.

        Special tokens that were added beyond those, such as a mask that the vocabulary lacked, no text needs: there
        they are characters like others from now on, as are all special ones.

        Args:
            tokenizer: what makes the ids.
            model: what reads them.
            used: ids that it gets besides.

        Raises:
            InvalidModel: the tokenizer is not the model's.
        """
        with self.explained("tokenizer"):
            n_known = len(model.get_input_embeddings().weight)
            added = tokenizer.added_tokens_decoder
            beyond = {i: str(token) for i, token in added.items() if token.special and i >= n_known}
            if beyond:
                tokenizer.split_special_tokens = True
            made = tokenizer(["", *beyond.values()])["input_ids"]  # some would still find them in their vocabulary
            highest = max((set(tokenizer.get_vocab().values()) - beyond.keys()).union(used, *made))
        if highest >= n_known:
            raise InvalidModel(
                f"model {self.name!r}: its tokenizer has ids up to {highest}, and the model knows those below {n_known}"
            )

    def model(self, kind: Any, **options: Any) -> Any:
        """A model of a transformers class, in float32, all of its weights out of the checkpoint.

        Raises:
            InvalidModel: it cannot be read, or lacks weights, which transformers would make up at random.
        """
        with self.explained("weights"):
            model, report = kind.from_pretrained(
                self.location, local_files_only=self.local, dtype=torch.float32, output_loading_info=True, **options
            )
        for module in model.modules():
            if isinstance(getattr(module, "pooler", None), nn.Module):  # BERT's: never used here, and often not stored
                module.pooler = None
        missing = sorted(report["missing_keys"] & model.state_dict().keys())
        if missing:
            raise InvalidModel(f"model {self.name!r}: {len(missing)} weights are missing, first of them {missing[0]}")
        return model

    def load_into(self, model: Any, may_miss: Callable[[str], bool]) -> None:
        """Give a model of the embedded encoder the weights that are stored beside it, in whatever dtype.

        Raises:
            InvalidModel: they cannot be read, the model has no such weights, or one is absent that may not be.
        """
        with self.explained("weights"):
            state = {name: weight.float() for name, weight in load_file(self.file(WEIGHTS) or WEIGHTS).items()}
            missing, unexpected = model.load_state_dict(state, strict=False)
        wrong = [name for name in missing if not may_miss(name)] + unexpected
        if wrong:
            raise InvalidModel(f"model {self.name!r}: {len(wrong)} weights are missing or unknown, first {wrong[0]}")

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """transformers raises errors of every kind here. Raises InvalidModel."""
        try:
            with quiet():
                yield
        except InvalidModel:
            raise
        except Exception as error:
            raise InvalidModel(f"model {self.name!r}: cannot load its {what}: {first_line(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice, which belong in no log."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


def weights_digest(model: Any) -> str:
    """Digest of all weights by name, as float32: the same whatever file format they are stored in."""
    seen: set[int] = set()
    digests = {}
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() not in seen:  # tied weights count once
            seen.add(tensor.data_ptr())
            digests[name] = [list(tensor.shape), hashlib.sha256(tensor.cpu().float().contiguous().numpy()).hexdigest()]
    return json_digest(digests)


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of the vocabulary and of how it splits text: tokenizer files change with the library that writes them."""
    return json_digest([tokenizer.get_vocab(), tokenizer(PROBE)["input_ids"]])


def n_positions(model: Any, names: Sequence[str] = ("max_position_embeddings",)) -> int | None:
    """How many tokens a model reads at most, by the first of these names in its config; None (-1): no matter how many.

    RoBERTa and its like count positions from behind that of the padding: those before it hold no token.
    """
    found = next((each for name in names if (each := getattr(model.config, name, None) or 0) > 0), None)
    embeddings = getattr(model.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    return found if found is None or padding is None else found - padding - 1


def first_line(error: Exception) -> str:
    """What an error of transformers or torch says, without the page that follows, unless that is the reasons."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0].rstrip()
    return shorten(text, REASONS) if first.endswith(":") else first
