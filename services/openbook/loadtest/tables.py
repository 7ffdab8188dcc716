"""Figures as cells of text, for the terminal and for pages."""

from collections.abc import Iterator

from openbook.loadtest.kinds import Arrivals
from openbook.loadtest.knee import Knee
from openbook.loadtest.result import Latency, Result

Row = tuple[str, ...]
MAX_EXAMPLE = 120


def summary(result: Result) -> list[str]:
    """What was done, and the rates that came of it: a line each."""
    settings, found = result.settings, result.measured
    over = "HTTP" if settings.is_http else "gRPC"
    spread = f"{settings.arrivals} of cv {settings.cv:g}" if settings.arrivals is Arrivals.GAMMA else settings.arrivals
    how = f"open loop, {spread} at {settings.rate:g}/s" if settings.closed is None else closed(settings.closed)
    lines = [
        f"{settings.what} over {over}, {how}",
        f"{found.n:,} questions in {settings.duration_s:g} s, after a warm-up of {settings.warm_up_s:g} s",
        f"offered {found.offered_rate:.2f}/s  answered {found.answered_rate:.2f}/s  goodput {found.goodput_rate:.2f}/s",
        f"goodput: answered within {settings.timeout_s:g} s, {found.good_share:.2%} of what was offered",
    ]
    if settings.closed is None:
        lines.append(f"sent/intended {found.on_time:.4f}  hangs {found.n_hangs}  refused {found.n_refused}")
    else:
        lines.append(f"hangs {found.n_hangs}  refused {found.n_refused}")
    if settings.check:
        lines.append(f"{found.n_wrong} of {found.n_checked} answers compared are wrong")
    return lines


def closed(n: int) -> str:
    """What is said of a closed loop wherever its figures stand."""
    callers = f"{n} caller{'s' if n > 1 else ''}"
    return f"CLOSED loop of {callers}: latencies are service times"


def status_rows(result: Result) -> Iterator[Row]:
    """Outcome, n, share, per second, what it was seen as, example."""
    found = result.measured
    for each in found.statuses:
        seen = ", ".join(f"{name}: {n}" for name, n in each.seen.items() if name != each.status)
        numbers = (f"{each.n:,}", f"{each.n / found.n:.2%}", f"{each.n / found.duration_s:.2f}")
        yield (each.status, *numbers, seen, " ".join(each.example.split())[:MAX_EXAMPLE])


def latency_rows(result: Result) -> Iterator[Row]:
    """Of what, n, mean, percentiles and maximum in milliseconds."""
    found = result.measured
    named: list[tuple[str, Latency | None]] = [
        ("answered", found.latency),
        ("first token", found.first_token),
        ("refused", found.refusal),
    ]
    if result.settings.closed is None:
        named.append(("sent late by", found.send_delay))
    if result.warm_up:
        named.append(("(warm-up)", result.warm_up.latency))
    for name, of in named:
        if of:
            values = (of.mean_s, of.p50_s, of.p90_s, of.p99_s, of.p999_s, of.max_s)
            yield (name, f"{of.n:,}", *map(milliseconds, values))


def knee_rows(knee: Knee) -> Iterator[Row]:
    """Rate, offered, goodput, share, p50, p99, and what was missed; in the order of the search."""
    for step, missed in zip(knee.steps, knee.missed, strict=True):
        found = step.measured
        latencies = (found.latency.p50_s, found.latency.p99_s) if found.latency else (None, None)
        rates = (f"{step.settings.rate:g}", f"{found.offered_rate:.1f}", f"{found.goodput_rate:.1f}")
        yield (*rates, f"{found.good_share:.3f}", *map(milliseconds, latencies), missed or "holds")


def milliseconds(seconds: float | None) -> str:
    """With three digits that count."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f}"
