"""Spans as OpenTelemetry has them: to a collector, or to a file for looking without one."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from threading import Thread
from types import TracebackType
from typing import Any

from openbook.core.context import Context
from openbook.errors import InvalidConfig, OpenbookError
from openbook.tracing.ports import Kind, Value

try:
    from opentelemetry import trace
    from opentelemetry.context import Context as Parent
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
except ModuleNotFoundError as missing:
    raise InvalidConfig(
        f"traces are asked for, and {missing.name} is not installed: pip install 'openbook[otel]'"
    ) from None

KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
NO_PARENT = Parent()
CANCELLED = "CANCELLED"
FLUSH_S = 2.0
"""For a collector that answers; one that does not would hold up whoever ends for half a minute."""


class OtelTracer:
    """Spans of one process. Sampled as OTEL_TRACES_SAMPLER says, or as the caller's trace is.

    Args:
        role: of the process.
        file: one span of JSON a line is added to it; several processes may write to one.
        sends: whether spans go to where OTEL_EXPORTER_OTLP_ENDPOINT says.

    Raises:
        InvalidConfig: the exporter is not installed, or the file cannot be written.
    """

    def __init__(self, role: str, file: str | None, sends: bool) -> None:
        named = OTELResourceDetector().detect().attributes.get("service.name")  # what we say outweighs the environment
        name = named or f"openbook-{role.partition('-')[0]}"
        self._provider = TracerProvider(resource=Resource.create({"service.name": name, "openbook.role": role}))
        if file:
            self._provider.add_span_processor(SimpleSpanProcessor(_Lines(role, file)))
        if sends:
            self._provider.add_span_processor(BatchSpanProcessor(_otlp()))
        self._tracer = self._provider.get_tracer("openbook")

    def begin(
        self, name: str, context: Context, kind: Kind, links: Iterable[Context], attributes: dict[str, Value]
    ) -> "_Span":
        parent = _parse(context.trace)
        linked = [trace.Link(each) for each in map(_parse, (other.trace for other in links)) if each is not None]
        if context.request_id:
            attributes["request_id"] = context.request_id
        started = self._tracer.start_span(
            name,
            trace.set_span_in_context(trace.NonRecordingSpan(parent), NO_PARENT) if parent else NO_PARENT,
            KINDS[kind],
            attributes,
            linked,
            record_exception=False,
            set_status_on_exception=False,
        )
        return _Span(started, context)

    def flush(self) -> None:
        sender = Thread(target=self._provider.force_flush, daemon=True)  # OpenTelemetry heeds no time limit here
        sender.start()
        sender.join(FLUSH_S)

    def close(self) -> None:
        self._provider.shutdown()


class _Span:
    """See `spans.Recording`."""

    def __init__(self, started: trace.Span, context: Context) -> None:
        of = started.get_span_context()
        traceparent = f"00-{of.trace_id:032x}-{of.span_id:016x}-{of.trace_flags:02x}"
        self.context = replace(context, trace=traceparent)
        self._span = started

    def note(self, **attributes: Value) -> None:
        self._span.set_attributes(attributes)

    def end(self, code: str = "OK") -> None:
        if self._span.is_recording():
            self._span.set_attribute("code", code)
            if code not in ("OK", CANCELLED):
                self._span.set_status(trace.StatusCode.ERROR)
            self._span.end()

    def __enter__(self) -> Context:
        return self.context

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        elif isinstance(error, OpenbookError):
            self.end(error.grpc_code)
        else:
            self.end("INTERNAL" if isinstance(error, Exception) else CANCELLED)  # or a stream was closed


class _Lines(SpanExporter):
    """One span a line."""

    def __init__(self, role: str, file: str) -> None:
        self._role = role
        try:
            self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidConfig(f"OPENBOOK_TRACE_FILE = {file!r}: cannot be written: {error.strerror}") from None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for each in spans:  # in one piece, or those of another process would stand in between
            os.write(self._file, (json.dumps(self._line(each)) + "\n").encode())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        os.close(self._file)

    def _line(self, span: ReadableSpan) -> dict[str, Any]:
        of = span.get_span_context()
        assert of is not None
        return {
            "name": span.name,
            "process": self._role,
            "trace_id": f"{of.trace_id:032x}",
            "span_id": f"{of.span_id:016x}",
            "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
            "kind": span.kind.name.lower(),
            "start_ns": span.start_time,
            "end_ns": span.end_time,
            "attributes": dict(span.attributes or {}),
            "links": [
                {"trace_id": f"{each.context.trace_id:032x}", "span_id": f"{each.context.span_id:016x}"}
                for each in span.links
            ],
        }


def _parse(traceparent: str) -> trace.SpanContext | None:
    """Of W3C; none for what is none."""
    parts = traceparent.split("-")
    try:
        _, trace_id, span_id, flags = (int(part, 16) for part in parts[:4])
    except ValueError:
        return None
    found = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
    return found if found.is_valid else None


def _otlp() -> SpanExporter:
    """The exporter that OTEL_EXPORTER_OTLP_PROTOCOL names: http/protobuf, or grpc."""
    names = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    variable = next(filter(os.environ.get, names), names[1])
    protocol = os.environ.get(variable) or "http/protobuf"
    if protocol not in ("http/protobuf", "grpc"):
        raise InvalidConfig(f"{variable} must be http/protobuf or grpc, got {protocol!r}")
    kind = protocol.partition("/")[0]
    try:
        module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
    except ModuleNotFoundError as missing:
        package = f"opentelemetry-exporter-otlp-proto-{kind}"
        raise InvalidConfig(f"{variable} = {protocol!r}: {missing.name} is not there: pip install {package}") from None
    exporter: SpanExporter = module.OTLPSpanExporter()
    return exporter
