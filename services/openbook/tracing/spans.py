"""Spans: time spent on somebody's behalf, as a child of what his context's `trace` names. Off, they cost nothing.

OpenTelemetry is needed, and imported, only where `setup_tracing` finds that its standard environment asks for it.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from openbook.core.context import Context
from openbook.errors import InvalidConfig
from openbook.tracing.ports import Kind, Recording, Tracer, Value

SAMPLED = frozenset("13579bdf")
"""What a traceparent ends with whose last bit says that it is."""


class _Off:
    """Of no span."""

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        self.context = context

    def note(self, **attributes: Value) -> None: ...
    def end(self, code: str = "OK") -> None: ...
    def __enter__(self) -> Context:
        return self.context

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_tracer: Tracer | None = None


def setup_tracing(role: str) -> None:
    """Record spans of this process, if the environment says where to: OTEL_EXPORTER_OTLP_ENDPOINT or its kin, or
    OPENBOOK_TRACE_FILE. What OTEL_TRACES_SAMPLER chooses; whether a caller's trace is sampled, he has decided.
    OTEL_TRACES_EXPORTER=none sends none.

    Raises:
        InvalidConfig: the environment asks for what is not there or not installed, or what cannot be written.
    """
    global _tracer
    file, off = os.environ.get("OPENBOOK_TRACE_FILE"), os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    sends = any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_"))
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if sends and not off and exporter not in ("otlp", "none"):
        raise InvalidConfig(f"OTEL_TRACES_EXPORTER must be otlp or none, got {exporter!r}")
    if _tracer is not None:
        _tracer.close()
        _tracer = None
    sends = sends and exporter == "otlp"
    if not off and (file or sends):
        from openbook.tracing.otel import OtelTracer

        _tracer = OtelTracer(role, file, sends)


def flush_spans() -> None:
    """Send what has been recorded: for processes that are about to be killed."""
    if _tracer is not None:
        _tracer.flush()


def is_traced(context: Context) -> bool:
    """Whether there is a trace that spans on this context's behalf become part of."""
    return _tracer is not None and context.trace[-1:] in SAMPLED


def span(
    name: str, context: Context, kind: Kind = "internal", links: Iterable[Context] = (), /, **attributes: Value
) -> Recording:
    """A span that begins now, and ends with the body of `with`, which gets the context for its own work, or by `end`.

    What the body raises ends it with a code: of an error its message is not recorded, for it may quote the question.
    """
    return _Off(context) if _tracer is None else _tracer.begin(name, context, kind, links, attributes)


def span_of_call(name: str, context: Context, /) -> Recording:
    """A server's, of a call by one of ours: as `span`, but a call on nobody's behalf begins no trace."""
    return span(name, context, "server") if context.trace else _Off(context)


def together(name: str, contexts: Iterable[Context], /, **attributes: Value) -> AbstractContextManager[None]:
    """Work that is done at once on behalf of several: a span for each, and where they are several one of the whole,
    with links both ways. What the body raises ends them all with its code.
    """
    return _NOTHING if _tracer is None else _Together(name, list(contexts), attributes)


_NOTHING = nullcontext()


class _Together:
    def __init__(self, name: str, contexts: Sequence[Context], attributes: dict[str, Value]) -> None:
        self._spans: list[Recording] = []
        traced = [context for context in contexts if is_traced(context)]
        links = []
        if traced and len(contexts) > 1:
            # In the trace of one of them, so that it is kept where theirs are.
            whole = span(f"{name} batch", traced[0], "internal", traced, n=len(contexts), **attributes)
            self._spans.append(whole)
            links.append(whole.context)
        self._spans += [span(name, context, "internal", links, **attributes) for context in traced]

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._spans:
            each.__exit__(kind, error, trace)
