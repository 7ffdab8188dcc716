"""An explanation in the terminal."""

from collections.abc import Iterator, Sequence
from math import exp

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from openbook.core.types import Token
from openbook.errors import InvalidRequest
from openbook.explain.parts import Alone, Parts

LEAST_CELL = 4
"""Cells of a column of the heat map: ".97" and a space."""
HEAT = (0, 103, 165)
LEAST_LIT = 0.05


def print_explanation(explained: Parts, console: Console) -> None:
    """The answer; each passage with its prior, what it says alone, its posterior; each token with its passages."""
    answer = explained.answer
    text = Text(explained.text or "(empty)", style="bold green")
    if answer.abstained:
        text.append("   (held back)", "dim")
    if explained.said.cut:
        text.append("   (cut off)", "dim")
    about = (
        f"RAG-{answer.formulation.title()}  p(y|x) {exp(answer.log_likelihood):.3f}  snapshot {answer.snapshot_id[:12]}"
    )
    parts: list[RenderableType] = [text, Text(about, style="dim"), Text(), _passages(explained)]
    parts += [Text(why, style="dim") for why in _not_alone(explained)]
    for table in _heat(explained, console.width - 4):
        parts += [Text(), table]
    console.print(Panel(Group(*parts), title=Text(explained.question), title_align="left"))


def _passages(explained: Parts) -> Table:
    table = Table(box=None, padding=(0, 1), expand=True, header_style="dim")
    for title in ("", "prior", "post."):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("passage", ratio=1, no_wrap=True)
    table.add_column("alone it says", ratio=1, no_wrap=True)
    table.add_column("p", justify="right", no_wrap=True)
    best = max((each.log_posterior for each in explained.answer.evidence), default=0.0)
    for number, (each, alone) in enumerate(zip(explained.answer.evidence, explained.alone, strict=True), start=1):
        table.add_row(
            f"[{number}]",
            f"{exp(each.log_prior):.3f}",
            f"{exp(each.log_posterior):.3f}",
            Text(each.passage.title or each.passage.text),
            *_alone(alone),
            style="" if each.log_posterior == best else "dim",
        )
    return table


def _alone(alone: Alone | InvalidRequest) -> tuple[Text, str]:
    if isinstance(alone, InvalidRequest):
        return Text("-"), "-"
    return Text(alone.text or "(empty)"), f"{exp(alone.log_likelihood):.3f}"


def _not_alone(explained: Parts) -> Iterator[str]:
    """Why passages were not read alone, each reason once, whatever each of them has."""
    whys: dict[str, list[str]] = {}
    for number, alone in enumerate(explained.alone, start=1):
        if isinstance(alone, InvalidRequest):
            whys.setdefault(str(alone).partition(", got ")[0], []).append(f"[{number}]")
    for why, numbers in whys.items():
        yield f"{', '.join(numbers)}: cannot be read alone: {why}"


def _heat(explained: Parts, width: int) -> Iterator[Table]:
    """As many tables below each other as the tokens need."""
    n = len(explained.answer.evidence)
    for words in _lines(explained.words, width - len(f"[{n}]") - 2):
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column("", justify="right", no_wrap=True)
        for word in words:
            table.add_column(Text(word.text.strip() or "(end)"), justify="right", no_wrap=True)
        for passage in range(n):
            table.add_row(f"[{passage + 1}]", *(_cell(exp(word.log_posterior[passage])) for word in words))
        yield table


def _lines(words: Sequence[Token], width: int) -> Iterator[list[Token]]:
    line: list[Token] = []
    left = width
    for word in words:
        needs = max(LEAST_CELL, cell_len(word.text.strip() or "(end)")) + 1
        if line and needs > left:
            yield line
            line, left = [], width
        line.append(word)
        left -= needs
    if line:
        yield line


def _cell(p: float) -> Text:
    """The number on a ground the brighter the more it is."""
    if p < LEAST_LIT:
        return Text(f"{p:.2f}", "dim")
    red, green, blue = (round(20 + p * (each - 20)) for each in HEAT)
    return Text(f"{p:.2f}", f"white on rgb({red},{green},{blue})")
