"""What an experiment found, and the one page that shows it: nothing else is needed to read it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from openbook.evaluation.summary import Mean

STYLE = """
:root { color-scheme: light dark; --paper: light-dark(#fbf9f4, #131417); --ink: light-dark(#1d1b18, #ece8e0);
  --soft: light-dark(#5f594f, #aaa59a); --line: light-dark(#e0dacd, #33363c); --good: light-dark(#00785a, #3fc69c);
  --bad: light-dark(#a4161a, #ff8a80); }
body { font: 1rem/1.5 Inter, system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  padding: 1rem; max-width: 62rem; overflow-wrap: break-word; }
h1 { font: 500 2rem/1.2 Georgia, serif; } h2 { font-size: 1.125rem; margin: 2rem 0 .5rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } img { max-width: 100%; }
td, th { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td { font-variant-numeric: tabular-nums; } th, .soft { color: var(--soft); font-weight: 400; }
pre { white-space: pre-wrap; } .ok { color: var(--good); } .fail { color: var(--bad); font-weight: 600; }
"""


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
class Table:
    """Rows under titles. `hidden` ones open with a click."""

    name: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """One experiment."""

    title: str
    about: Sequence[str]  # paragraphs: what was done, and what it says
    command: str  # that makes it again
    made_of: Sequence[tuple[str, str]]  # seeds, fingerprints, sizes, times
    expected: Sequence[Expected]
    tables: Sequence[Table]
    pictures: Sequence[tuple[str, str]] = ()  # a caption, and an image as a data URL

    @property
    def is_as_expected(self) -> bool:
        """Whether every number lies where it was expected."""
        return all(each.is_met for each in self.expected)

    def write(self, path: Path) -> None:
        """As one page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.page(), encoding="utf-8")

    def page(self) -> str:
        """The page. Everything shown is escaped."""
        parts = [
            f"<h1>{escape(self.title)}</h1>",
            *(f"<p>{escape(each)}</p>" for each in self.about),
            "<h2>Expected</h2>",
            _table(("number", "expected", "found", ""), [_verdict(each) for each in self.expected]),
            *map(_shown, self.tables),
            *(f'<figure><img src="{escape(url)}" alt="{escape(of)}"><figcaption>{escape(of)}</figcaption></figure>'
              for of, url in self.pictures),
            "<h2>How it was made</h2>",
            f"<pre>{escape(self.command)}</pre>",
            _table((), [[escape(cell) for cell in row] for row in self.made_of]),
        ]  # fmt: skip
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style><body>{''.join(parts)}</body></html>\n"
        )


def percent(mean: Mean) -> str:
    """With its interval."""
    return f"{100 * mean.value:.1f} % ({100 * mean.low:.1f} to {100 * mean.high:.1f})"


def _verdict(expected: Expected) -> list[str]:
    word = '<span class="ok">ok</span>' if expected.is_met else '<span class="fail">FAIL</span>'
    return [escape(expected.what), f"{expected.low:g} to {expected.high:g}", f"{expected.found:.4g}", word]


def _shown(table: Table) -> str:
    whole = _table(table.titles, [[escape(cell) for cell in row] for row in table.rows])
    if table.hidden:
        return f"<details><summary>{escape(table.name)}</summary>{whole}</details>"
    return f"<h2>{escape(table.name)}</h2>{whole}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Of cells that are HTML already."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
