"""One step after the other: micro-batches, gradients of all workers, AdamW; checkpoints to go on from.

Nothing here knows what is trained. Which examples a step has, and the random numbers of each micro-batch, follow from
seed, step and the micro-batch's number alone, so a run can be interrupted anywhere, and split among any number of
workers, without a different result: on CPUs, interrupted, to the bit, else up to rounding. Workers add up in another
order, and on GPUs the gradients of embeddings are added up in none.
"""

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from openbook.errors import InvalidConfig, OpenbookError
from openbook.training.batches import micro_batches
from openbook.training.settings import LoopSettings, OptimizerSettings
from openbook.training.world import Alone, World

E = TypeVar("E", contravariant=True)
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Loss:
    """Of one portion."""

    total: Tensor  # () summed over its examples
    sums: Mapping[str, float]  # what else a person should see, summed over its examples; always the same names


class Objective(Protocol[E, P]):
    """What is trained: a torch module, as far as its parameters go."""

    def collate(self, examples: Sequence[E]) -> P:
        """What the loss needs, without gradients. Called with the weights of this step, beside another `forward`."""
        ...

    def portions(self, collated: P) -> Iterable[P]:
        """A micro-batch in as many parts as its loss can be added up from: what one computed for its backward pass is
        gone before the next begins."""
        ...

    def __call__(self, portion: P) -> Loss:
        """The loss of a portion."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did, over all workers. Losses are per example."""

    step: int  # from 1
    loss: float
    learning_rate: float
    gradient_norm: float  # before clipping
    tokens_per_s: float
    means: Mapping[str, float]

    def scalars(self) -> dict[str, float]:
        """All numbers by name."""
        own = {"loss": self.loss, "learning_rate": self.learning_rate, "gradient_norm": self.gradient_norm}
        return {**own, "tokens_per_s": self.tokens_per_s, **self.means}


class TrainingDiverged(OpenbookError):
    """The loss, the gradient or a query is not a number any more."""


class Loop(Generic[E, P]):
    """A run at some step."""

    def __init__(
        self,
        objective: Objective[E, P],
        examples: Sequence[E],
        settings: LoopSettings,
        optimizer: OptimizerSettings,
        frozen: Sequence[str] = (),
        world: World | None = None,
    ) -> None:
        """`frozen` are patterns of parameter names.

        Raises:
            InvalidConfig: there is nothing to train, or a pattern names no parameter.
        """
        self.step = 0
        self.world: World = world or Alone()
        self._objective, self._examples, self._settings, self._schedule = objective, examples, settings, optimizer
        assert isinstance(objective, nn.Module)
        for setting, patterns in (("frozen", frozen), ("learning_rates", optimizer.learning_rates)):
            _check_patterns(objective, setting, patterns)
        self.parameters = _trained(objective, frozen)
        self.optimizer = _adamw(self.parameters, optimizer)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._device = next(iter(self.parameters.values())).device
        for parameter in self.parameters.values():  # on every worker, whatever its micro-batches are
            parameter.grad = torch.zeros_like(parameter)
        self._background = ThreadPoolExecutor(1, "collate")

    def run(self) -> Iterator[StepReport]:
        """Steps until the last one."""
        while self.step < self._settings.n_steps:
            yield self._one_step()

    def close(self) -> None:
        """End the thread in the background."""
        self._background.shutdown(cancel_futures=True)

    def _one_step(self) -> StepReport:
        begun, settings = perf_counter(), self._settings
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        sums: dict[str, float] = {}
        for number, collated in self._collated():
            torch.manual_seed(_mixed(settings.seed, self.step, number))
            # One context for all portions: it keeps the weights that it has rounded.
            with self._autocast(settings.dtype == "bfloat16"):
                for portion in self._objective.portions(collated):
                    loss = self._objective(portion)
                    with self._autocast(False):
                        # Divided by the examples of all workers: then adding up gradients is all there is to being
                        # several.
                        (loss.total / settings.batch_size).backward()  # type: ignore[no-untyped-call]
                    total += loss.total.detach()
                    for name, value in loss.sums.items():
                        sums[name] = sums.get(name, 0.0) + value
        reported = torch.tensor([float(total), *sums.values()], dtype=torch.float64, device=self._device)
        self.world.add_up([*(p.grad for p in self.parameters.values() if p.grad is not None), reported])
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self._schedule.max_gradient_norm)
        if not (math.isfinite(float(norm)) and math.isfinite(float(reported[0]))):
            raise TrainingDiverged(f"loss {float(reported[0])}, gradient norm {float(norm)}")
        rate = self._update()
        means = [value / settings.batch_size for value in reported.tolist()]
        named = dict(zip(sums, means[1:], strict=True))
        seconds = perf_counter() - begun
        tokens_per_s = named.pop("tokens", 0.0) * settings.batch_size / seconds
        return StepReport(self.step, means[0], rate, float(norm), tokens_per_s, named)

    def _collated(self) -> Iterator[tuple[int, P]]:
        """The micro-batches of this step. The next one is collated while one is computed, and none beyond the step:
        the weights that it is collated with are those it is computed with."""
        settings, world = self._settings, self.world
        batches = micro_batches(
            self.step,
            len(self._examples),
            settings.batch_size,
            settings.micro_batch_size,
            settings.seed,
            world.rank,
            world.n_workers,
        )
        chosen = [[self._examples[i] for i in batch.examples] for batch in batches]
        following = self._background.submit(self._objective.collate, chosen[0])
        for i, batch in enumerate(batches):
            collated = following.result()
            if i + 1 < len(batches):
                following = self._background.submit(self._objective.collate, chosen[i + 1])
            yield batch.number, collated

    def _autocast(self, enabled: bool) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=enabled)

    def _update(self) -> float:
        factor = rate_factor(self.step, self._settings.n_steps, self._schedule)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.step += 1
        return factor * self._schedule.learning_rate


def rate_factor(step: int, n_steps: int, settings: OptimizerSettings) -> float:
    """What the learning rate of step 0, 1, ... is multiplied with: up over the warm-up, then down to 0."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.decay == "constant":
        return 1.0
    left = (n_steps - step) / max(1, n_steps - settings.warmup_steps)
    return left if settings.decay == "linear" else 0.5 * (1 - math.cos(math.pi * left))


def _check_patterns(module: nn.Module, setting: str, patterns: Iterable[str]) -> None:
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise InvalidConfig(
                f"{setting}: {pattern!r} names no parameter; there are {names[0]!r} and {len(names) - 1} more"
            )


WITHOUT_EFFECT = ("*.key.bias", "*.k_proj.bias", "*.k_lin.bias")
"""What all keys have in common, softmax does not see. The gradients are rounding, which Adam would make full steps of:
other ones for every number of workers."""


def _trained(module: nn.Module, frozen: Sequence[str]) -> dict[str, nn.Parameter]:
    for name, parameter in module.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in (*frozen, *WITHOUT_EFFECT)):
            parameter.requires_grad_(False)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trained:
        raise InvalidConfig(f"frozen: {list(frozen)} leave nothing to train")
    return trained


def _adamw(parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        rates = (rate for pattern, rate in settings.learning_rates.items() if fnmatch.fnmatchcase(name, pattern))
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        groups.setdefault((next(rates, settings.learning_rate), decay), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": some, "lr": rate, "weight_decay": decay} for (rate, decay), some in groups.items()],
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )


def _mixed(seed: int, step: int, number: int) -> int:
    """One seed out of three numbers."""
    return int(np.random.SeedSequence((seed, step, number)).generate_state(1, np.uint64)[0] >> 1)
