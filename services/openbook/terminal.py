"""What a person sees: answers with their evidence, and progress bars."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from math import exp, isnan, nan
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from openbook.console import CONTROLS, SafeConsole
from openbook.core import metrics
from openbook.core.origin import Origin
from openbook.core.types import Coverage, Passage
from openbook.corpus.sources.limits import one_line
from openbook.rag.answer import Answer

if TYPE_CHECKING:
    from openbook.corpus.duplicates import Repeated
    from openbook.corpus.former import Changes
    from openbook.corpus.sources.limits import Failure
    from openbook.evaluation.calibrate import Judged
    from openbook.index.client.publish import Listed
    from openbook.serving.access.keys import KeyRecord

console = SafeConsole()

SIDE_BY_SIDE = 3
"""Results that have room in 80 columns."""
_BAR = re.compile(r"(?<!\\)\|")

OnProgress = Callable[[str, int, int], None]
"""Called with the stage's name, how much is done and how much there is; 0: nobody knows yet."""


def counted(n: float, what: str) -> str:
    """`1 shard`, `2 shards`."""
    return f"{n:.15g} {what}{'s' * (n != 1)}"


def print_answer(question: str, response: Answer) -> None:
    """The answer, then each passage with its score, p(z|x) and p(z|x,y), then where the time went."""
    table = Table(box=None, padding=(0, 1), expand=True, header_style="dim")
    for title in ("score", "prior", "posterior"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("passage", ratio=1)
    best = max((e.log_posterior for e in response.evidence), default=0.0)
    for number, evidence in enumerate(response.evidence, 1):
        named = f"[{number}] " if response.tokens else ""  # as their table has it
        passage = Text.assemble(named, (evidence.passage.title, "bold"), "  ", evidence.passage.text)
        passage.truncate(2 * max(20, console.width - 42), overflow="ellipsis")
        if place := _document_place(evidence.passage):
            passage.append(f"\n{place}", "dim")
        style = "" if evidence.log_posterior == best else "dim"
        numbers = (f"{evidence.score:.4f}", f"{exp(evidence.log_prior):.3f}", f"{exp(evidence.log_posterior):.3f}")
        table.add_row(*numbers, passage, style=style)
    timings = "  ".join(f"{stage} {seconds * 1000:.0f}" for stage, seconds in response.timings.items())
    partial = "" if response.complete else f"\nPARTIAL: {_searched(response.coverage)}"
    cached = "  embedding from cache" if response.cached else ""
    footer = Text(
        f"{timings} ms\n"
        f"RAG-{response.formulation.title()}  log p(y|x) {response.log_likelihood:.3f}{cached}\n"
        f"snapshot {response.snapshot_id[:12]}  generator {response.generator_fingerprint[:12]}{partial}",
        style="dim",
    )
    answer = Text(response.text or ("(held back)" if response.abstained else "(empty)"), style="bold green")
    if response.cut:
        answer.append("   (cut off)", "dim")
    if response.confidence is not None:
        answer.append(f"   right with probability {response.confidence:.2f}", "dim")
    if response.labels:
        shares = ", ".join(f"{label.text} {exp(label.log_probability):.3f}" for label in response.labels)
        answer.append(f"   of {shares}", "dim")
    parts = [answer, *_alternatives(response), Text(), table, *_tokens(response), Text(), footer]
    console.print(Panel(Group(*parts), title=Text(question), title_align="left"))


def print_passages(passages: Iterable[Passage], as_json: bool = False, marked: int | None = None) -> None:
    """Each with where it comes from; as JSON, a line each. One may be marked, by its id."""
    has_all = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    for passage in passages:
        if as_json:
            line = json.dumps({**asdict(passage), "lasting_id": passage.lasting_id}, ensure_ascii=not has_all)
            print(CONTROLS.sub(lambda control: f"\\u{ord(control[0]):04x}", line))
            continue
        style = "" if marked in (None, passage.id) else "dim"
        named = f"{passage.id}  {passage.lasting_id}".rstrip()
        console.print(Text.assemble((passage.title or passage.document_id, "bold"), f"  {named}", style=style))
        if passage.origin:
            console.print(Padding(Text(_place(passage.origin), "dim"), (0, 0, 0, 4)))
        console.print(Padding(Text(passage.text, style), (0, 0, 1, 4)))


def _document_place(passage: Passage) -> str:
    """Where a person would look for it; of a file of many documents he would know no more."""
    if (origin := passage.origin) is None:
        return ""
    file = origin.path if origin.path == passage.document_id else ""
    page = f"page {origin.page}" if origin.page else ""
    return " · ".join(part for part in (origin.url or file, origin.section, page) if part)


def _place(origin: Origin) -> str:
    """All that is known, but for the digest."""
    page = f"page {origin.page} · " if origin.page else ""
    in_words = {
        "page": f"{page}characters {origin.start} to {origin.end}",
        "fields": " · ".join(f"{name} {value}" for name, value in origin.fields.items()),
    }
    known = {**asdict(origin), **in_words, **dict.fromkeys(("document_digest", "start", "end"))}
    return " · ".join(str(value) for value in known.values() if value)


def _alternatives(response: Answer) -> Iterator[Text]:
    for each in response.answers:
        cut = "   (cut off)" if each.cut else ""
        yield Text(f"  {exp(each.log_likelihood):.3f}  {each.text or '(empty)'}{cut}", style="dim")


def _tokens(response: Answer) -> Iterator[RenderableType]:
    """Each token, log p of it, and how much of it each passage carries."""
    if response.tokens:
        table = Table(box=None, padding=(0, 1), header_style="dim")
        table.add_column("token")
        table.add_column("log p", justify="right")
        for number in range(1, len(response.evidence) + 1):
            table.add_column(f"[{number}]", justify="right")
        for token in response.tokens:
            shares = (f"{exp(each):.2f}" for each in token.log_posterior)
            table.add_row(Text(token.text.strip() or "(end)"), f"{token.log_likelihood:.3f}", *shares)
        yield Text()
        yield table


def print_snapshots(rows: "Iterable[Listed]") -> None:
    """For each where it lies, its state, its id and when it was built (UTC); below, what it is, and its recall."""
    rows = list(rows)
    width = max((len(row.where) for row in rows), default=0)
    for row in rows:
        state = f"{row.state or 'not served'} {row.sequence or ''}"
        created = row.created_at[:16].replace("T", " ")
        recall = "/".join(map(str, sorted(row.recall)))
        shares = " ".join(f"{share:.3f}" for _, share in sorted(row.recall.items()))
        measured = f"recall@{recall} {shares}" if recall else "recall not measured"
        style = {"current": "green", "": "dim"}.get(row.state, "")
        console.print(Text(f"{row.where:<{width}}  {state:<12} {row.snapshot_id[:12]}  {created}", style))
        if row.snapshot_id:
            console.print(Padding(Text(f"{row.n_passages:,} passages  {row.factory}  {measured}", style), (0, 0, 0, 4)))


def print_keys(records: "Iterable[KeyRecord]", now: float) -> None:
    """A row a key, the newest last; those that let nobody in are dim."""
    from openbook.serving.access.keys import caller_name
    from openbook.serving.access.quota import policies_of

    table = Table(box=None, padding=(0, 1), header_style="dim")
    for title in ("key", "of", "may", "made", "expires", "state"):
        table.add_column(title, no_wrap=title == "key", overflow="fold")
    for record in sorted(records, key=lambda each: each.created):
        state = record.why_dead(now)
        days = [_day(time) for time in (record.created, record.expires)]
        quotas = (f"{each.limit} {each.unit} a {each.window}" for each in policies_of(record.limits))
        may = "\n".join((" ".join(record.scopes), *quotas))
        row = (f"ob_{record.prefix}_", caller_name(record.tenant, record.name), may, *days, state or "alive")
        table.add_row(*row, style="dim" if state else "")
    console.print(table)


def _day(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError):  # of a key that was made before such were refused
        return "after 9999"


def _searched(coverage: Coverage) -> str:
    missing = ", ".join(map(str, coverage.missing_shards))
    return f"{coverage.n_searched} of {coverage.n_total} passages searched, shard {missing} missing"


@contextmanager
def print_failures(failures: "Sequence[Failure]") -> Iterator[None]:
    """When the body has ended, however it did, what it could not read: a line each, on standard error."""
    try:
        yield
    finally:
        for failure in failures:
            print(f"left out: {failure}", file=sys.stderr)
        if failures:
            print(f"left out: {sum(failure.n for failure in failures)} in all", file=sys.stderr)


def print_changes(changes: "Changes") -> None:
    """What a corpus has that a former snapshot of it had not, and the other way round: a line each."""
    for what, found in (("added", changes.added), ("changed", changes.changed), ("removed", changes.removed)):
        names = [*map(one_line, found.first), *(["..."] if found.n > len(found.first) else ())]
        listed = f" ({', '.join(names)})" if names else ""
        print(f"documents {what}: {found.n}{listed}")
    print(f"documents as before: {changes.n_as_before}")
    print(f"passages: {changes.n_passages}, of which {changes.n_kept} keep their vectors")


def print_repeated(repeated: "Repeated") -> None:
    """How many passages repeat others, and the first of them."""
    counts = f"{repeated.n_equal} equal, {repeated.n_near} nearly so"
    print(f"passages that repeat one before them: {counts}, of {repeated.n_read}")
    for pair in repeated.first:
        print(f"  {one_line(pair.document)} repeats {one_line(pair.of)}: {one_line(pair.text)}")


class _Rate(ProgressColumn):
    """How many a second, of late."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f}/s" if task.speed and not task.finished else "")


@contextmanager
def build_progress() -> Iterator[OnProgress]:
    """One bar for each stage that reports."""
    columns = (
        TextColumn("{task.description:<28}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    bars = Progress(*columns, console=SafeConsole(stderr=True))
    with ExitStack() as stack:
        tasks: dict[str, TaskID] = {}

        def on_progress(stage: str, done: int, total: int) -> None:
            if not tasks:  # only now: without a bar it would end with an empty line
                stack.enter_context(bars)
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or None, completed=done)  # those were done before
            bars.update(tasks[stage], completed=done, total=total or None)

        yield on_progress


@contextmanager
def bytes_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes, with speed and time left."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=SafeConsole(stderr=True)) as bars:
        task = bars.add_task("", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def training_progress(n_steps: int) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """A bar with loss, learning rate, tokens per second and time left; a line for every validation."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=SafeConsole(stderr=True)) as bars:
        task = bars.add_task("", total=n_steps)
        mean: float | None = None

        def on_step(step: int, scalars: Mapping[str, float]) -> None:
            nonlocal mean
            described = ""
            if "loss" in scalars:
                mean = scalars["loss"] if mean is None else 0.95 * mean + 0.05 * scalars["loss"]
                rate, speed = scalars["learning_rate"], scalars["tokens_per_s"]
                described = f"loss {mean:.3f}  rate {rate:.1e}  {speed:,.0f} tokens/s"
            bars.update(task, completed=step, description=described)
            prefix = "validation/"
            measured = {k.removeprefix(prefix): v for k, v in scalars.items() if k.startswith(prefix)}
            if measured:
                bars.console.print(f"step {step}: " + "  ".join(f"{name} {v:.3f}" for name, v in measured.items()))

        yield on_step


def print_calibration(judged: Sequence["Judged"]) -> None:
    """What a fit of confidence is worth on other questions than its own: calibration error and AUROC."""
    rows = [["RAG-", "fitted", "judged", "right", "error", "now", "chance", "AUROC", "now"]]
    for each in judged:
        pairs = [(of, each.right) for of in (each.before, each.after)]
        found = [
            float(each.right.mean()) if len(each.right) else nan,
            *(metrics.reliability(*pair).expected_error for pair in pairs),
            each.error_by_chance,
            *(metrics.auroc(*pair) for pair in pairs),
        ]
        shown = ("-" if isnan(value) else f"{value:.3f}" for value in found)
        rows.append([each.formulation.title(), str(each.n_fitted), str(len(each.right)), *shown])
    _print_table(rows)


def print_summary(markdown: str) -> None:
    """An evaluation's numbers as its `summary.md` has them, in whose tables a row is wider than a terminal: what is one
    row for each file and formulation becomes a column, and what is several stands under their names.
    """
    for is_table, block in groupby(markdown.splitlines(), lambda line: line.startswith("|")):
        if not is_table:
            console.print(Text("\n".join(line.lstrip("# ") for line in block)))
            continue
        titles, _, *rows = ([cell.strip().replace("\\|", "|") for cell in _BAR.split(line)[1:-1]] for line in block)
        n_named = len({"questions", "formulation"}.intersection(titles))
        named: dict[str, list[list[str]]] = {}
        for row in rows:
            named.setdefault(", ".join(row[:n_named]), []).append(row[n_named:])
        if all(len(of) == 1 for of in named.values()):
            columns = [[name, *of[0]] for name, of in named.items()]
            for at in range(0, len(columns), SIDE_BY_SIDE):
                _print_table(zip(["", *titles[n_named:]], *columns[at : at + SIDE_BY_SIDE], strict=True))
            continue
        for name, of in named.items():
            console.print(Text(f" {name}", "dim"))
            _print_table([titles[n_named:], *of])


def _print_table(rows: Iterable[Sequence[str]]) -> None:
    """The first are titles."""
    titles, *others = rows
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for at, title in enumerate(titles):
        table.add_column(Text(title), justify="right" if at else "left", overflow="fold")
    for row in others:
        table.add_row(*map(Text, row))
    console.print(table)


def print_finding(what: str, level: str, says: str) -> None:
    """A row of `openbook doctor`."""
    style = {"well": "green", "mind": "yellow", "ill": "red"}[level]
    console.print(Text(f"{level:<5} ", style), end="")
    console.print(f"{what}: {says}", highlight=False, soft_wrap=True)
