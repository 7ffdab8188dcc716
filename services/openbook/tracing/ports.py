"""What records spans, as those see it on whose behalf it does."""

from collections.abc import Iterable
from types import TracebackType
from typing import Literal, Protocol

from openbook.core.context import Context

Kind = Literal["internal", "server", "client"]
Value = str | int | float | bool


class Recording(Protocol):
    """A span under way."""

    context: Context
    """Of those who work within it: its `trace` names this span."""

    def note(self, **attributes: Value) -> None:
        """What was not known at its beginning."""

    def end(self, code: str = "OK") -> None:
        """It is over, with a gRPC code. Whatever comes later is ignored."""

    def __enter__(self) -> Context: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Tracer(Protocol):
    """Where spans go."""

    def begin(
        self, name: str, context: Context, kind: Kind, links: Iterable[Context], attributes: dict[str, Value]
    ) -> Recording: ...
    def flush(self) -> None:
        """Send what was not sent yet, as far as that takes no longer than a moment."""

    def close(self) -> None:
        """The same, and record nothing any more."""
