"""Steps: the same result for any number of workers and interruptions, as plain torch would compute it."""

import math
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import tiny_training as tiny
import torch
from hypothesis import given
from hypothesis import settings as fewer
from hypothesis import strategies as st
from torch import Tensor, nn

from openbook.errors import InvalidConfig
from openbook.training import checkpoints
from openbook.training.batches import micro_batches
from openbook.training.loop import Loop, Loss, StepReport, TrainingDiverged, rate_factor
from openbook.training.settings import LoopSettings, OptimizerSettings

EXAMPLES = torch.randn(11, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Toy(nn.Module):
    """Learns that the sum of three numbers is their sum."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.double()

    def collate(self, examples: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(examples))

    def portions(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split(8)

    def forward(self, x: Tensor) -> Loss:
        error = self.second(self.dropout(self.first(x).tanh()))[:, 0] - x.sum(-1)
        return Loss((error**2).sum(), {"error": float(error.detach().abs().sum()), "tokens": float(x.numel())})


def loop_of(objective: nn.Module | None = None, world: Any = None, frozen: Sequence[str] = (), **given: Any) -> Any:
    of_loop = {name: given.pop(name) for name in list(given) if name in LoopSettings.model_fields}
    settings = LoopSettings(**{"out": "out", "n_steps": 6, "batch_size": 8, "micro_batch_size": 2, **of_loop})
    optimizer = OptimizerSettings(**{"learning_rate": 0.1, **given})
    return Loop(objective or Toy(), EXAMPLES, settings, optimizer, frozen, world)


def trained(loop: Any) -> tuple[list[StepReport], dict[str, Tensor]]:
    try:
        reports = list(loop.run())
    finally:
        loop.close()
    return reports, {name: parameter.detach().clone() for name, parameter in loop.parameters.items()}


def numbers(reports: Sequence[StepReport]) -> list[dict[str, float]]:
    return [{k: v for k, v in report.scalars().items() if k != "tokens_per_s"} for report in reports]


def test_a_run_is_what_plain_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch as a whole, clipped, decayed, its rate scheduled by torch. Each step takes two seconds."""
    clock = count(step=2)
    monkeypatch.setattr("openbook.training.loop.perf_counter", lambda: next(clock))
    options = {"weight_decay": 0.3, "max_gradient_norm": 4.0, "warmup_steps": 2, "betas": (0.8, 0.95), "seed": 4}
    reports, got = trained(loop_of(**options))

    toy = Toy()
    matrices, vectors = ([p for p in toy.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95), eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: [0.5, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0][step])
    norms = []
    for step, report in enumerate(reports):
        toy.unused.grad = torch.zeros_like(toy.unused)
        chosen = [i for batch in micro_batches(step, len(EXAMPLES), 8, 2, 4) for i in batch.examples]
        loss = toy(EXAMPLES[chosen]).total / 8
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(toy.parameters(), 4.0)))
        assert report.learning_rate == pytest.approx(schedule.get_last_lr()[0])
        adam.step()
        schedule.step()
        adam.zero_grad()
        assert report.step == step + 1
        assert report.loss == pytest.approx(loss.item())
        assert report.gradient_norm == pytest.approx(norms[-1])
        assert report.means.keys() == {"error"}
        assert report.tokens_per_s == EXAMPLES[chosen].numel() / 2
    assert min(norms) < 4.0 < max(norms), "or nothing was clipped, or everything"
    for name, parameter in toy.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach())


def test_only_matrices_decay() -> None:
    """Nothing but decay moves a parameter without a gradient."""
    _, got = trained(loop_of(weight_decay=0.5, decay="constant", n_steps=3))
    torch.testing.assert_close(got["unused"], torch.full((2, 2), (1 - 0.1 * 0.5) ** 3, dtype=torch.float64))
    flat = Toy()
    flat.unused = nn.Parameter(torch.ones(4, dtype=torch.float64))
    _, got = trained(loop_of(flat, weight_decay=0.5, n_steps=3))
    assert torch.equal(got["unused"], torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_size_of_micro_batches_changes_nothing(size: int) -> None:
    reports, got = trained(loop_of(micro_batch_size=size))
    wanted_reports, wanted = trained(loop_of(micro_batch_size=8))
    torch.testing.assert_close(got, wanted)
    for one, other in zip(numbers(reports), numbers(wanted_reports), strict=True):
        assert one == pytest.approx(other)


@pytest.mark.parametrize("n_workers", [2, 4])
def test_the_number_of_workers_changes_nothing(n_workers: int) -> None:
    """Dropout included: its random numbers are those of the micro-batch. Every worker reports and holds the same."""
    alone, wanted = trained(loop_of(Toy(dropout=0.4)))
    together, results = tiny.Together(n_workers), {}

    def work(world: Any) -> None:
        results[world.rank] = trained(loop_of(Toy(dropout=0.4), world))

    together.run(work)
    assert len(results) == n_workers
    for reports, got in results.values():
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)
        for one, other in zip(numbers(reports), numbers(alone), strict=True):
            assert one == pytest.approx(other)
    assert len({tuple(got["first.weight"].flatten().tolist()) for _, got in results.values()}) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_is_computed_in_the_dtype_asked_for_and_its_gradients_outside_of_autocast(dtype: str) -> None:
    rounds: list[bool] = []

    class Watched(Toy):
        def forward(self, x: Tensor) -> Loss:
            rounds.append(torch.is_autocast_enabled("cpu"))
            loss = super().forward(x)
            loss.total.register_hook(lambda _: rounds.append(torch.is_autocast_enabled("cpu")))
            return loss

    trained(loop_of(Watched(), n_steps=1, dtype=dtype))
    assert rounds == [dtype == "bfloat16", False] * 4


def test_dropout_differs_between_micro_batches_steps_and_seeds() -> None:
    masks: list[tuple[float, ...]] = []

    class Watched(Toy):
        def forward(self, x: Tensor) -> Loss:
            masks.append(tuple(self.dropout(torch.ones(40)).tolist()))
            return super().forward(x)

    for seed in (0, 1):
        trained(loop_of(Watched(dropout=0.5), n_steps=2, seed=seed))
    assert len(masks) == 16
    assert len(set(masks)) == 16


@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_run_that_goes_on_ends_with_the_same_bits(tmp_path: Path, after: int) -> None:
    """From a process that knows nothing of the first: another's random numbers, fresh weights."""

    def fresh() -> Any:
        torch.manual_seed(after)
        return loop_of(Toy(dropout=0.4), warmup_steps=2, weight_decay=0.1, decay="cosine")

    whole, wanted = trained(fresh())
    begun = fresh()
    steps = begun.run()
    first = [next(steps) for _ in range(after)]
    checkpoints.save(tmp_path / "c", begun, {})
    begun.close()
    going_on = fresh()
    checkpoints.restore(tmp_path / "c", going_on, {})
    rest, got = trained(going_on)
    assert numbers([*first, *rest]) == numbers(whole)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_micro_batches_are_collated_ahead_and_never_with_old_weights() -> None:
    """The next one while this one is computed; none of the next step before this step's update."""
    events: list[tuple[str, float]] = []

    class Watched(Toy):
        def collate(self, examples: Sequence[Tensor]) -> Tensor:
            events.append(("collate", float(self.first.weight.detach().sum())))
            return super().collate(examples)

        def forward(self, x: Tensor) -> Loss:
            events.append(("compute", float(self.first.weight.detach().sum())))
            return super().forward(x)

    trained(loop_of(Watched(), n_steps=3))
    assert len(events) == 3 * 8
    for step in range(3):
        of_step = events[step * 8 : step * 8 + 8]
        assert sorted(kind for kind, _ in of_step) == ["collate"] * 4 + ["compute"] * 4
        assert len({weights for _, weights in of_step}) == 1
    assert len({weights for _, weights in events}) == 3


def test_what_goes_wrong_in_the_background_ends_the_step() -> None:
    class Failing(Toy):
        def collate(self, examples: Sequence[Tensor]) -> Tensor:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        trained(loop_of(Failing()))


RATES = st.builds(
    OptimizerSettings,
    warmup_steps=st.integers(0, 30),
    decay=st.sampled_from(["constant", "linear", "cosine"]),
)


@fewer(max_examples=100)
@given(RATES, st.integers(1, 60))
def test_rates_go_up_then_down(schedule: OptimizerSettings, n_steps: int) -> None:
    factors = [rate_factor(step, n_steps, schedule) for step in range(n_steps)]
    warm, then = factors[: schedule.warmup_steps], factors[schedule.warmup_steps :]
    assert all(0 < factor <= 1 for factor in factors)
    assert warm == pytest.approx([(i + 1) / schedule.warmup_steps for i in range(len(warm))])
    assert then == sorted(then, reverse=True)
    assert not then or then[0] == 1.0
    if schedule.decay == "constant":
        assert set(then) <= {1.0}
    elif then:
        assert rate_factor(n_steps, n_steps, schedule) == pytest.approx(0)
    n = len(then)
    if schedule.decay == "linear":
        assert then == pytest.approx([1 - i / n for i in range(n)])
    if schedule.decay == "cosine":
        assert then == pytest.approx([(1 + math.cos(math.pi * i / n)) / 2 for i in range(n)])


def test_frozen_parameters_keep_their_values() -> None:
    before = Toy().state_dict()
    toy = Toy()
    _, got = trained(loop_of(toy, frozen=["first.*", "*.bias"]))
    assert got.keys() == {"second.weight", "unused"}
    for name, value in toy.state_dict().items():
        assert torch.equal(value, before[name]) == (name != "second.weight")


def test_rates_of_their_own_for_some_parameters() -> None:
    """The first pattern counts. Adam's first step is as long as the rate, whatever the gradient."""
    rates = {"first.weight": 0.01, "first.*": 0.02, "unused": 0.5}
    before = Toy().state_dict()
    _, got = trained(loop_of(learning_rates=rates, n_steps=1, epsilon=1e-30))
    for name, length in {"first.weight": 0.01, "first.bias": 0.02, "second.weight": 0.1, "unused": 0.0}.items():
        torch.testing.assert_close((got[name] - before[name]).abs(), torch.full_like(got[name], length))


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: loop_of(frozen=["third.*"]), "frozen: 'third.*' names no parameter; there are '.*' and 4 more"),
        (lambda: loop_of(learning_rates={"third.*": 1.0}), "learning_rates: 'third.*' names no parameter"),
        (lambda: loop_of(frozen=["*"]), r"frozen: \['\*'\] leave nothing to train"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(build: Callable[[], Any], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        build()


def test_rates_may_be_given_for_what_is_frozen() -> None:
    """An ablation with a frozen encoder needs no other line than that."""
    before, toy = Toy().state_dict(), Toy()
    trained(loop_of(toy, frozen=["first.*"], learning_rates={"first.*": 0.01}, n_steps=1))
    changed = {name for name, value in toy.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"second.weight", "second.bias"}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda loss: loss * math.nan, "loss nan, gradient norm nan"),
        (lambda loss: loss * math.inf, "loss inf, gradient norm nan"),
        (lambda loss: loss + math.inf, r"loss inf, gradient norm [\d.]+"),
        (lambda loss: loss + (loss - loss.detach()).sqrt(), r"loss [\d.]+, gradient norm (inf|nan)"),
    ],
)
def test_a_loss_or_gradient_that_is_no_number_ends_the_run_with_the_weights_as_they_were(
    changed: Callable[[Tensor], Tensor], why: str
) -> None:
    class Diverging(Toy):
        n_calls = 0

        def forward(self, x: Tensor) -> Loss:
            self.n_calls += 1
            loss = super().forward(x)
            return Loss(changed(loss.total), loss.sums) if self.n_calls > 9 else loss

    toy = Diverging()
    loop = loop_of(toy)
    steps = loop.run()
    next(steps), next(steps)
    before = {name: parameter.detach().clone() for name, parameter in toy.named_parameters()}
    with pytest.raises(TrainingDiverged, match=f"^{why}$"):
        next(steps)
    loop.close()
    assert loop.step == 2
    assert all(torch.equal(parameter, before[name]) for name, parameter in toy.named_parameters())
