"""What an experiment found, and the one page that shows it: nothing else is needed to read it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import resources
from math import isnan, nan
from pathlib import Path
from typing import Any

from openbook import files
from openbook.core.fingerprint import file_digest
from openbook.errors import InvalidConfig
from openbook.evaluation.record import differences
from openbook.evaluation.summary import Mean

TOLERANCE = 0.03
"""How far a share may lie from that of a former run: bits differ between processors, and some answers with them."""
MARK = '<script type="application/json" id="numbers">'


@dataclass(frozen=True, slots=True)
class Expected:
    """A number, and the range in which it was expected."""

    what: str
    found: float
    low: float
    high: float

    @property
    def is_met(self) -> bool:
        """Whether it lies there. NaN lies nowhere."""
        return self.low <= self.found <= self.high


@dataclass(frozen=True, slots=True)
class Heat:
    """A share that is shown with a ground as strong as it is."""

    share: float  # 0..1


Cell = str | Mean | Heat
"""What a table holds; a `Mean` is shown in per cent with its interval, as numbers and as a bar."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under titles. `hidden` ones open with a click."""

    name: str
    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    hidden: bool = False
    about: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """One experiment."""

    title: str
    about: Sequence[str]  # paragraphs: what was done, and what it says
    command: str  # that makes it again
    made_of: Sequence[tuple[str, str]]  # seeds, fingerprints, sizes, times
    expected: Sequence[Expected]
    tables: Sequence[Table]
    pictures: Sequence[tuple[str, str]] = ()  # a caption, and an SVG, which is put in as it is
    plan: Mapping[str, Any] = field(default_factory=dict)  # all that the numbers depend on, processors apart
    numbers: Mapping[str, float] = field(default_factory=dict)  # shares, by their names, that the same plan gives again

    @property
    def is_as_expected(self) -> bool:
        """Whether every number lies where it was expected."""
        return all(each.is_met for each in self.expected)

    def against(self, page: Path) -> "Report":
        """With the numbers of a former page among the expected ones.

        Raises:
            InvalidConfig: it is no page with numbers, or it was made of something else; names the first difference.
        """
        former = numbers_of(page)
        if difference := next(differences(_lasting(former["plan"]), _lasting(self.plan)), None):
            raise InvalidConfig(f"{page}: was made of something else: {difference}")
        again = [
            Expected(f"{name}, as in {page.name}", self.numbers.get(name, nan), then - TOLERANCE, then + TOLERANCE)
            for name, then in former["numbers"].items()
            if not isnan(then)  # of nothing: it is none again
        ]
        return replace(self, expected=[*self.expected, *again])

    def write(self, path: Path) -> None:
        """As one page."""
        files.write(path, self.page())

    def page(self) -> str:
        """The page. Everything shown is escaped, but the pictures."""
        verdicts = [_verdict(each) for each in self.expected]
        n_met = sum(each.is_met for each in self.expected)
        all_met = '<span class="ok">ok</span>' if self.is_as_expected else '<span class="fail">FAIL</span>'
        numbers = json.dumps({"plan": self.plan, "numbers": self.numbers}).replace("<", "\\u003c")
        figures = "".join(
            f'<figure role="img" aria-label="{escape(of)}">{svg}<figcaption>{escape(of)}</figcaption></figure>'
            for of, svg in self.pictures
        )
        parts = [
            f'<p class="soft">openbook experiment</p><h1>{escape(self.title)}</h1>',
            *(f"<p>{escape(each)}</p>" for each in self.about),
            f"<h2>Expected {all_met} <small>{n_met} of {len(self.expected)}</small></h2>",
            _table(("number", "expected", "found", ""), verdicts),
            f'<div class="figures">{figures}</div>' if figures else "",
            *map(_shown, self.tables),
            "<h2>How it was made</h2>",
            f"<pre>{escape(self.command)}</pre>",
            _table((), [[escape(cell) for cell in row] for row in self.made_of]),
            f"{MARK}{numbers}</script>",
        ]
        style = (resources.files("openbook") / "experiments/report.css").read_text(encoding="utf-8")
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{style}</style><body>{''.join(parts)}</body></html>\n"
        )


def numbers_of(page: Path) -> dict[str, Any]:
    """The plan and the numbers that a page holds. Raises InvalidConfig: it is none, or has none."""
    found: dict[str, Any]
    try:
        found = json.loads(page.read_text(encoding="utf-8").partition(MARK)[2].partition("</script>")[0])
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{page}: is no experiment's page with numbers: {error}") from None
    return found


def _lasting(plan: Mapping[str, Any]) -> Any:
    """Without what `dtype: auto` became on one processor, which the encoder's fingerprint ends in."""

    def without(part: dict[str, Any]) -> dict[str, Any]:
        found = part.get("encoder_fingerprint")
        return {**part, "encoder_fingerprint": found.partition("-")[0]} if isinstance(found, str) else part

    return json.loads(json.dumps(plan), object_hook=without)


def digest(path: Path) -> str:
    """What identifies a file, for `made_of`."""
    return f"{path.name}, sha256 {file_digest(path)}"


def share(value: float) -> str:
    """In per cent."""
    return "–" if isnan(value) else f"{100 * value:.1f}"


def _verdict(expected: Expected) -> list[str]:
    word = '<span class="ok">ok</span>' if expected.is_met else '<span class="fail">FAIL</span>'
    low, high = f"{expected.low:.4g}", f"{expected.high:.4g}"
    if abs(expected.low) == float("inf"):
        within = f"at most {high}"
    else:
        within = f"at least {low}" if expected.high == float("inf") else f"{low} to {high}"
    return [escape(expected.what), within, f"{expected.found:.4g}", word]


def _shown(table: Table) -> str:
    about = f'<p class="soft">{escape(table.about)}</p>' if table.about else ""
    whole = about + _table(table.titles, [[_cell(cell) for cell in row] for row in table.rows])
    if table.hidden:
        return f"<details><summary>{escape(table.name)}</summary>{whole}</details>"
    return f"<h2>{escape(table.name)}</h2>{whole}"


def _cell(cell: Cell) -> str:
    match cell:
        case str():
            return escape(cell)
        case Heat():
            return f'<span class="heat" style="--p:{cell.share:.3f}">{cell.share:.2f}</span>'
        case Mean() if isnan(cell.value):
            return "–"
    low, high = share(cell.low), share(cell.high)
    style = f"--v:{cell.value:.3f};--l:{cell.low:.3f};--h:{cell.high:.3f}"
    return f'<span class="mean" style="{style}"><b>{share(cell.value)}</b> <small>{low} to {high}</small><i></i></span>'


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of cells that are HTML already."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'
