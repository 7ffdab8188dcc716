"""Checkpoints of a run: exact, whole, of this run, and no more of them than asked for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended import gpu
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from openbook import files
from openbook.errors import InvalidConfig
from openbook.training import checkpoints
from openbook.training.checkpoints import MOMENTS, STATE, WEIGHTS, InvalidCheckpoint
from openbook.training.loop import Loop, Loss
from openbook.training.settings import LoopSettings, OptimizerSettings

EXAMPLES = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
PLAN = {"snapshot": "a", "loop": '{"seed": 0}'}


class Toy(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(5, 3)
        self.frozen = nn.Linear(3, 2)

    def collate(self, examples: Any) -> Tensor:
        return torch.stack(list(examples))

    def portions(self, x: Tensor) -> list[Tensor]:
        return [x]

    def forward(self, x: Tensor) -> Loss:
        return Loss((self.frozen(self.layer(x)) ** 2).sum(), {})


def loop_of(toy: Toy) -> Loop[Any, Any]:
    settings = LoopSettings(out=Path("out"), n_steps=10, batch_size=4, micro_batch_size=2)
    return Loop(toy, EXAMPLES, settings, OptimizerSettings(learning_rate=0.1), ["frozen.*"])


def loop_after(n_steps: int, seed: int = 0) -> Loop[Any, Any]:
    loop = loop_of(Toy(seed))
    steps = loop.run()
    for _ in range(n_steps):
        next(steps)
    loop.close()
    return loop


def state_of(loop: Loop[Any, Any]) -> dict[str, Tensor]:
    moments = {f"{n}.{k}": v for n, p in loop.parameters.items() for k, v in loop.optimizer.state[p].items()}
    return {**{n: p.detach() for n, p in loop.parameters.items()}, **moments}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoints.save(tmp_path / "step-3", loop_after(3), PLAN)
    return tmp_path / "step-3"


def test_weights_moments_and_step_come_back_to_the_bit(saved: Path) -> None:
    original, loop = loop_after(3), loop_after(1, seed=5)
    checkpoints.restore(saved, loop, PLAN)
    assert loop.step == 3
    got, wanted = state_of(loop), state_of(original)
    assert got.keys() == wanted.keys()
    assert len(wanted) == 2 + 2 * 3
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value)


def test_on_a_gpu_moments_are_there_too(saved: Path) -> None:
    """A pretended one: files are read on the CPU."""
    with gpu() as device:
        loop = loop_of(Toy(0).to(device))
        checkpoints.restore(saved, loop, PLAN)
        assert {value.device for value in state_of(loop).values()} == {device}


def test_only_what_is_trained_is_kept(saved: Path) -> None:
    assert sorted(load_file(saved / WEIGHTS)) == ["layer.bias", "layer.weight"]
    assert sorted(path.name for path in saved.parent.iterdir()) == ["step-3"]


def swap_two_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["layer.bias"]
    save_file(weights, folder / WEIGHTS)


def of_state(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = {**json.loads((folder / STATE).read_text()), **changes}
        (folder / STATE).write_text(json.dumps({key: value for key, value in state.items() if value is not None}))

    return damage


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), "No such file"),
        (lambda folder: (folder / MOMENTS).unlink(), "No such file"),
        (lambda folder: (folder / STATE).unlink(), "No such file"),
        (lambda folder: swap_two_bytes(folder / WEIGHTS), r"weights\.safetensors was altered"),
        (lambda folder: swap_two_bytes(folder / MOMENTS), r"moments\.safetensors was altered"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), r"weights\.safetensors was altered"),
        (without_a_weight, r"weights\.safetensors was altered"),
        (lambda folder: (folder / STATE).write_text('{"step": 3, "pl'), "Unterminated string"),
        (lambda folder: (folder / STATE).write_text("[]"), ""),
        (of_state(plan=None), "'plan'"),
        (of_state(plan="a"), ""),
        (of_state(sha256=None), "'sha256'"),
        (of_state(step=None), "'step'"),
    ],
)
def test_what_is_not_whole_or_was_altered_is_refused(saved: Path, damage: Callable[[Path], None], problem: str) -> None:
    damage(saved)
    with pytest.raises(InvalidCheckpoint, match=rf"step-3: not a whole checkpoint: .*{problem}"):
        checkpoints.restore(saved, loop_after(1), PLAN)


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({**PLAN, "snapshot": "b"}, "was made with snapshot = 'a', this run has 'b'; give it a folder of its own"),
        ({"loop": PLAN["loop"]}, "snapshot = 'a', this run has None"),
        ({**PLAN, "seed": 1}, "seed = None, this run has 1"),
    ],
)
def test_a_checkpoint_of_another_plan_is_refused_with_the_difference(
    saved: Path, plan: dict[str, Any], problem: str
) -> None:
    loop = loop_after(1)
    before = {name: value.clone() for name, value in state_of(loop).items()}
    with pytest.raises(InvalidConfig, match=problem):
        checkpoints.restore(saved, loop, plan)
    assert all(torch.equal(value, before[name]) for name, value in state_of(loop).items())


def test_the_newest_is_gone_on_from_and_the_oldest_are_removed(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path) is None
    assert checkpoints.latest(tmp_path / "absent") is None
    loop = loop_after(1)
    for step in (2, 99, 10_000_000, 9_999_999):
        checkpoints.save(tmp_path / checkpoints.name_of(step), loop, PLAN)
    half = files.partial_of(tmp_path / checkpoints.name_of(20_000_000))
    copy, other = tmp_path / "step-9999999.bak1", tmp_path / "step-99-2"
    for each in (half, copy, other):
        each.mkdir()
    assert checkpoints.latest(tmp_path) == tmp_path / "step-10000000"
    checkpoints.prune(tmp_path / "step-10000000", 2)
    left = {half.name, copy.name, other.name, "step-10000000", "step-9999999"}
    assert {path.name for path in tmp_path.iterdir()} == left
    checkpoints.prune(tmp_path / "step-10000000", 5)
    assert len(list(tmp_path.iterdir())) == len(left)


def test_a_torn_one_is_passed_over_named_and_removed_once_there_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        checkpoints.save(tmp_path / checkpoints.name_of(step), loop_after(step), PLAN)
    one, two, three = checkpoints.kept(tmp_path)
    (three / WEIGHTS).write_bytes((three / WEIGHTS).read_bytes()[:-1])
    swap_two_bytes(two / MOMENTS)
    assert checkpoints.latest(tmp_path) == one
    assert [record.getMessage() for record in caplog.records] == [
        f"{three}: not a whole checkpoint: {WEIGHTS} was altered; going on from {one.name}",
        f"{two}: not a whole checkpoint: {MOMENTS} was altered; going on from {one.name}",
    ]
    checkpoints.save(two, loop_after(2), PLAN)
    assert checkpoints.latest(tmp_path) == two
    checkpoints.prune(two, 1)
    assert list(tmp_path.iterdir()) == [two]
    (two / STATE).unlink()
    with pytest.raises(InvalidCheckpoint, match=r"step-0000002: not a whole checkpoint: .*No such file"):
        checkpoints.latest(tmp_path)  # to begin anew would cost what it has cost so far, and nobody asked for it


def test_what_was_half_written_is_written_again(tmp_path: Path, saved: Path) -> None:
    half = tmp_path / ".step-5.partial"
    half.mkdir()
    (half / WEIGHTS).write_bytes(b"half")
    checkpoints.save(tmp_path / "step-5", loop_after(5), PLAN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-5"]
    checkpoints.save(tmp_path / "step-5", loop_after(4), PLAN)
    loop = loop_after(0)
    checkpoints.restore(tmp_path / "step-5", loop, PLAN)
    assert loop.step == 4
