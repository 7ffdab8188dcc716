"""What a person sees of a load test in a terminal of 80 columns."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from openbook.console import SafeConsole
from openbook.loadtest.drive import OnProgress
from openbook.loadtest.knee import Knee
from openbook.loadtest.report import knee_summary
from openbook.loadtest.result import Result
from openbook.loadtest.settings import LoadSettings
from openbook.loadtest.tables import knee_rows, latency_rows, milliseconds, status_rows, summary

console = SafeConsole()


def show(result: Result) -> None:
    """All figures of a run."""
    console.print(Text(result.settings.address, "bold"))
    for line in summary(result):
        console.print(Text(line, "yellow" if "CLOSED" in line else ""))
    console.print()
    _print(("outcome", "n", "share", "a second", "seen as"), [row[:5] for row in status_rows(result)])
    for status, *_, example in status_rows(result):
        if example:
            console.print(Text(f"{status}: {example}", "dim"))
    console.print()
    _print(("milliseconds", "n", "mean", "p50", "p90", "p99", "p99.9", "max"), latency_rows(result))


def show_step(result: Result) -> None:
    """A step of a search in a line."""
    found = result.measured
    p99 = milliseconds(found.latency.p99_s) if found.latency else "-"
    console.print(f"{result.settings.rate:g}/s: goodput/offered {found.good_share:.3f}, p99 {p99} ms")


def show_knee(knee: Knee) -> None:
    """The steps of a search, and what it found."""
    _print(("rate", "offered", "goodput", "share", "p50 ms", "p99 ms", ""), knee_rows(knee))
    console.print(Text(knee_summary(knee), "bold"))


def _print(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for n, title in enumerate(titles):
        table.add_column(title, justify="left" if n == 0 or title in ("seen as", "") else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


@contextmanager
def load_progress(settings: LoadSettings) -> Iterator[OnProgress]:
    """A bar that is full when nothing more is sent, and what was sent, answered, and is in flight."""
    columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, console=SafeConsole(stderr=True), refresh_per_second=2) as bars:
        task = bars.add_task("connecting", total=settings.length_s)
        begun: list[float] = []

        def on_progress(n_begun: int, n_done: int, n_ok: int) -> None:
            begun.append(monotonic()) if not begun else None
            passed_s = min(settings.length_s, monotonic() - begun[0])
            said = f"sent {n_begun:,}  answered {n_ok:,}  not {n_done - n_ok:,}  in flight {n_begun - n_done:,}"
            bars.update(task, completed=passed_s, description=said)

        yield on_progress
