"""One trace as a picture: a row a span, in SVG, from the lines that OPENBOOK_TRACE_FILE names."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from openbook.errors import InvalidRequest, reason

WIDTH, NAMES, ROW, TOP = 1000, 270, 20, 44
COLOURS = ("#4e79a7", "#59a14f", "#e08214", "#b07aa1", "#9c755f", "#76b7b2", "#d37295", "#8c8c8c")
TOLD = ("shard", "replica", "k", "rows", "ids", "n")
"""Attributes that stand behind a span's bar."""


@dataclass(frozen=True, slots=True)
class Span:
    """A line of the file."""

    name: str
    process: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: list[dict[str, str]]


def read(path: Path) -> list[Span]:
    """All spans of a file. Raises InvalidRequest: it cannot be read, or a line is no span."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: cannot be read: {reason(error)}") from None
    spans = []
    for number, line in enumerate(lines, start=1):
        try:
            spans.append(Span(**json.loads(line)))
        except (TypeError, ValueError):
            raise InvalidRequest(f"{path}: line {number} is no span of ours") from None
    return spans


def choose(spans: Sequence[Span], request_id: str | None) -> list[Span]:
    """Those of one trace: of a request, or of the last that began. Raises InvalidRequest where there is none."""
    of = [each for each in spans if request_id in (None, each.attributes.get("request_id"))]
    if not of:
        raise InvalidRequest(f"no span has request id {request_id!r}" if spans else "there are no spans")
    began: dict[tuple[str, str], int] = {}  # a caller's trace may hold many requests
    for each in of:
        request = each.trace_id, each.attributes.get("request_id", "")
        began[request] = min(each.start_ns, began.get(request, each.start_ns))
    trace_id, _ = max(began, key=began.__getitem__)
    return [each for each in spans if each.trace_id == trace_id]


def in_rows(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Every span behind its parent, with its depth; those of one parent as they began."""
    known = {each.span_id for each in spans}
    children: dict[str, list[Span]] = {}
    for each in sorted(spans, key=lambda each: each.start_ns):
        children.setdefault(each.parent_id if each.parent_id in known else "", []).append(each)

    def below(parent: str, depth: int) -> Iterator[tuple[int, Span]]:
        for each in children.get(parent, ()):
            yield depth, each
            yield from below(each.span_id, depth + 1)

    return below("", 0)


def draw(spans: Sequence[Span]) -> str:
    """The SVG of one trace. What was cancelled is pale, what failed has a red edge."""
    rows = list(in_rows(spans))
    start = min(each.start_ns for each in spans)
    whole_ms = max((max(each.end_ns for each in spans) - start) / 1e6, 1e-3)
    processes = sorted({each.process for each in spans})
    colour = {process: COLOURS[i % len(COLOURS)] for i, process in enumerate(processes)}
    scale = (WIDTH - NAMES - 130) / whole_ms
    height = TOP + ROW * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for i, process in enumerate(processes):
        x = 10.0 + i * min(130, (WIDTH - 20) / len(processes))
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{colour[process]}"/>')
        parts.append(f'<text x="{x + 14}" y="17">{escape(process)}</text>')
    for tick in range(5):
        x, ms = NAMES + scale * whole_ms * tick / 4, whole_ms * tick / 4
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 8}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 10}" text-anchor="middle" fill="#666666">{_ms(ms)}</text>')
    for row, (depth, each) in enumerate(rows):
        y, x = TOP + ROW * row, NAMES + scale * (each.start_ns - start) / 1e6
        took_ms = (each.end_ns - each.start_ns) / 1e6
        code = each.attributes.get("code", "OK")
        pale = ' fill-opacity="0.35"' if code == "CANCELLED" else ""
        edge = ' stroke="#cc0000" stroke-width="1.5"' if code not in ("OK", "CANCELLED") else ""
        parts.append(f'<text x="{8 + 14 * depth}" y="{y + 14}">{escape(each.name)}</text>')
        width = max(scale * took_ms, 1.5)
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{ROW - 6}" rx="2" '
            f'fill="{colour[each.process]}"{pale}{edge}/>'
        )
        place = f'x="{x + width + 4:.1f}"' if x + width < 0.8 * WIDTH else f'x="{x - 4:.1f}" text-anchor="end"'
        if x + width >= 0.8 * WIDTH and x < NAMES + 0.4 * WIDTH:  # neither side has room
            place = f'x="{x + 6:.1f}"'
        parts.append(f'<text {place} y="{y + 14}" fill="#333333">{escape(_told(each, took_ms))}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ms(ms: float) -> str:
    # between these `g` writes no exponent
    return f"{ms:,.0f} ms" if ms >= 99.5 else f"{round(ms, 4):.2g} ms"


def _told(span: Span, took_ms: float) -> str:
    code = span.attributes.get("code", "OK")
    said = [_ms(took_ms), *(f"{name} {span.attributes[name]}" for name in TOLD if name in span.attributes)]
    said += [name for name in ("hedge", "retry") if span.attributes.get(name)]
    return ", ".join(said + ([code.lower()] if code != "OK" else []))
