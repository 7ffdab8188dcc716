"""What a loaded generator is: every weight as it was saved, one fingerprint, and the embedded reader unaltered."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tiny
import torch
from safetensors.torch import load_file

from openbook.errors import InvalidModel
from openbook.models.checkpoint import load_generator
from openbook.models.embedded import reader_folder


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """A copy of the embedded reader, to be damaged."""
    return Path(shutil.copytree(reader_folder(), tmp_path / "reader"))


@pytest.mark.parametrize(("build", "max_tokens"), [(tiny.bart, 128), (tiny.t5, 300)])
def test_weights_and_tokenizer_are_those_that_were_saved(
    tmp_path: Path, build: Callable[[], Any], max_tokens: int
) -> None:
    model = build()
    loaded = load_generator(tiny.save(tmp_path, model, tiny.byte_tokenizer()))
    ours, theirs = loaded.model.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert loaded.tokenizer("The Moon?")["input_ids"] == tiny.byte_tokenizer()("The Moon?")["input_ids"]
    assert loaded.input_format.max_tokens == max_tokens  # T5 has no limit of its own


def test_a_fingerprint_tells_weights_tokenizer_and_format_apart_and_nothing_else(tmp_path: Path) -> None:
    model, tokenizer = tiny.bart(), tiny.byte_tokenizer()
    one = load_generator(tiny.save(tmp_path / "one", model, tokenizer))
    again = load_generator(tiny.save(tmp_path / "again", one.model, one.tokenizer))
    assert again.fingerprint == one.fingerprint

    shorter = replace(one, input_format=replace(one.input_format, max_tokens=64))
    tokenizer.add_tokens(["edison"])
    other_tokenizer = replace(one, tokenizer=tokenizer)
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.bias[0] += 1e-6
    other_weights = replace(one, model=model)
    assert len({each.fingerprint for each in (one, shorter, other_tokenizer, other_weights)}) == 4


def test_the_embedded_reader_has_every_weight_that_it_stores() -> None:
    state = load_generator("embedded").model.state_dict()
    stored = load_file(reader_folder() / "model.safetensors")
    assert sum(weight.numel() for weight in stored.values()) == 17_925_690
    assert all(torch.equal(state[name], weight.float()) for name, weight in stored.items())


def test_an_altered_reader_is_refused(reader: Path) -> None:
    with (reader / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    declared = json.loads((reader / "openbook.json").read_text())["sha256"]
    with pytest.raises(InvalidModel, match=rf"model\.safetensors was altered: sha256 must be {declared}, got "):
        load_generator(str(reader))


def test_a_reader_that_stores_more_layers_than_it_declares_is_refused(reader: Path) -> None:
    path = reader / "openbook.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder_layers": 2}))
    with pytest.raises(InvalidModel, match=r"missing or unknown, first decoder\.bert\.encoder\.layer\.2"):
        load_generator(str(reader))
