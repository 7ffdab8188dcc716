"""How long each stage of one question took."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from openbook.core.context import Context
from openbook.core.deadline import Clock
from openbook.errors import OpenbookError
from openbook.telemetry import STAGE_SECONDS, stage_errors
from openbook.tracing.ports import Value
from openbook.tracing.spans import span


@dataclass(slots=True)
class Stopwatch:
    """Seconds by stage of what is done under a context, and since it was made."""

    clock: Clock
    context: Context
    started: float = field(init=False)
    stages: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @contextmanager
    def stage(self, name: str, **attributes: Value) -> Iterator[Context]:
        """Time the body, for the answer, for the metric and for the trace; the context is for what it calls."""
        begun = self.clock()
        try:
            with span(name, self.context, **attributes) as inner:
                yield inner
        except BaseException as error:
            stage_errors(name, _code(error)).inc()
            raise
        finally:
            seconds = self.clock() - begun
            self.add({name: seconds})
            STAGE_SECONDS.labels(name).observe(seconds)

    def add(self, stages: Mapping[str, float]) -> None:
        """What stages took, besides what they took before."""
        for name, seconds in stages.items():
            self.stages[name] = self.stages.get(name, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """All stages so far, and the total."""
        return {**self.stages, "total": self.clock() - self.started}


def _code(error: BaseException) -> str:
    """Of gRPC. Whoever is no error went away: tasks are cancelled and streams closed."""
    if isinstance(error, OpenbookError):
        return error.grpc_code
    return "INTERNAL" if isinstance(error, Exception) else "CANCELLED"
