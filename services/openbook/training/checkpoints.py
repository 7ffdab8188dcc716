"""A run on disk, to go on from: weights, AdamW's moments, how far it came, and what it must find again.

No state of schedule, data or random numbers: all of them follow from seed and step (see `loop`). Tensors lie in
safetensors: a checkpoint from elsewhere is data, not code.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from openbook import files
from openbook.core.fingerprint import file_digest
from openbook.errors import InvalidConfig, StartupError
from openbook.training.loop import Loop

log = logging.getLogger(__name__)

TENSORS = WEIGHTS, MOMENTS = "weights.safetensors", "moments.safetensors"
STATE = "state.json"
PREFIX = "step-"

FORMERLY = "loop.gradient_checkpointing"
"""In the plans of former versions, also of RAG, whose result it does not change."""

Plan = Mapping[str, Any]
"""What determines a run's result, by name: data, models, snapshot, settings. It may only go on with the very same."""


class InvalidCheckpoint(StartupError):
    """A checkpoint that is not whole, or of another run."""


def save(folder: Path, loop: Loop[Any, Any], plan: Plan) -> None:
    """Write a checkpoint. The folder appears whole or not at all, and survives a power cut."""
    with files.new_folder(folder) as partial:
        weights = {name: parameter.detach().contiguous() for name, parameter in loop.parameters.items()}
        save_file(weights, partial / WEIGHTS)
        save_file(_moments(loop), partial / MOMENTS)
        state = {"step": loop.step, "plan": plan, "sha256": {name: file_digest(partial / name) for name in TENSORS}}
        (partial / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # one that was not whole: no run gets here from a whole one


def restore(folder: Path, loop: Loop[Any, Any], plan: Plan) -> None:
    """Make a loop go on from a checkpoint.

    Raises:
        InvalidConfig: the checkpoint is one of another plan; names all that differs, and both values.
        InvalidCheckpoint: a file is missing or altered.
    """
    try:
        state = _state(folder)
        _check_plan(folder, state["plan"], plan)
        weights, moments = load_file(folder / WEIGHTS), load_file(folder / MOMENTS)
        with torch.no_grad():
            for name, parameter in loop.parameters.items():
                parameter.copy_(weights[name])
                loop.optimizer.state[parameter] = {
                    key: moments[f"{name}.{key}"].to(parameter.device) for key in ("step", "exp_avg", "exp_avg_sq")
                }
        loop.step = state["step"]
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise InvalidCheckpoint(f"{folder}: not a whole checkpoint: {error}") from None


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder, or None where there is none at all. The log names those that are not.

    Raises:
        InvalidCheckpoint: there are checkpoints, and none of them is whole.
    """
    problems: list[str] = []
    for found in reversed(kept(folder)):
        try:
            _state(found)
        except InvalidCheckpoint as error:
            problems.append(str(error))
            continue
        for problem in problems:
            log.warning("%s; going on from %s", problem, found.name)
        return found
    if problems:
        raise InvalidCheckpoint("; ".join(problems))
    return None


def prune(last: Path, n_kept: int) -> None:
    """Remove all checkpoints beside the one written last but the newest before it. Newer ones were not whole."""
    found = kept(last.parent)
    end = found.index(last) + 1
    for each in found[: max(0, end - n_kept)] + found[end:]:
        shutil.rmtree(each)


def kept(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, oldest first."""
    return sorted((each for each in folder.glob(f"{PREFIX}*") if each.name[len(PREFIX) :].isdecimal()), key=step_of)


def name_of(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"{PREFIX}{step:07d}"


def step_of(folder: Path) -> int:
    """After which a checkpoint was made, by its name."""
    return int(folder.name.removeprefix(PREFIX))


def _state(folder: Path) -> dict[str, Any]:
    """What a whole checkpoint says of itself. Raises InvalidCheckpoint: a file is missing or altered."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        for name in TENSORS:
            if file_digest(folder / name) != state["sha256"][name]:
                raise ValueError(f"{name} was altered")
        return {"step": int(state["step"]), "plan": dict(state["plan"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidCheckpoint(f"{folder}: not a whole checkpoint: {error}") from None


def _moments(loop: Loop[Any, Any]) -> dict[str, Tensor]:
    state = loop.optimizer.state
    return {
        f"{name}.{key}": value.detach().contiguous()
        for name, parameter in loop.parameters.items()
        for key, value in state[parameter].items()
    }


def _check_plan(folder: Path, found: Plan, plan: Plan) -> None:
    was, now = _by_key(found), _by_key(plan)
    differing = [
        f"{name} = {was.get(name)!r}, this run has {now.get(name)!r}"
        for name in sorted({*was, *now} - ({FORMERLY} - now.keys()))
        if was.get(name) != now.get(name)
    ]
    if differing:
        raise InvalidConfig(f"{folder}: was made with {'; '.join(differing)}; give it a folder of its own")


def _by_key(plan: Plan) -> dict[str, Any]:
    """A section of settings, which a plan has as JSON, as its keys."""
    keys: dict[str, Any] = {}
    for name, value in plan.items():
        if str(value).startswith("{"):
            keys |= {f"{name}.{key}": each for key, each in json.loads(value).items()}
        else:
            keys[name] = value
    return keys
