"""An explanation as HTML: a part for a notebook, and a page that needs nothing else. Everything shown is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from math import exp

from openbook.core.types import Token
from openbook.errors import InvalidRequest
from openbook.explain.parts import Alone, Parts
from openbook.rag.answer import Evidence

PAPER = "light-dark(#fbf9f4, #131417)"
"""Behind everything, as `--paper` below."""
STYLE = """
.openbook { color-scheme: light dark; --paper: light-dark(#fbf9f4, #131417); --ink: light-dark(#1d1b18, #ece8e0);
  --soft: light-dark(#5f594f, #aaa59a); --line: light-dark(#e0dacd, #33363c); --heat: light-dark(#0067a5, #63b3ee);
  font: 1rem/1.5 Inter, system-ui, sans-serif; color: var(--ink); background: var(--paper); padding: 1rem; }
.openbook h1 { font-size: 1.25rem; margin: 0; } .openbook h2 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
.openbook .answer { font: 1.75rem/1.3 Georgia, serif; margin: .25rem 0; }
.openbook .soft, .openbook th, .openbook caption { color: var(--soft); font-weight: 400; text-align: left; }
.openbook .scroll { overflow-x: auto; } .openbook table { border-collapse: collapse; }
.openbook td, .openbook th { padding: .25rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top;
  background: none; text-align: left; }
.openbook td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.openbook td.heat { text-align: right; font-variant-numeric: tabular-nums;
  background: color-mix(in srgb, var(--heat) calc(var(--p) * 70%), transparent); }
.openbook .bar { display: inline-block; height: .6em; width: calc(var(--p) * 5rem); margin-left: .4rem;
  background: var(--heat); }
.openbook summary { cursor: pointer; }
"""


def page(explained: Parts) -> str:
    """One page."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(explained.question)}</title>"
        f'<body style="margin:0;color-scheme:light dark;background:{PAPER}">{part(explained)}</body></html>\n'
    )


def part(explained: Parts) -> str:
    """What a notebook shows."""
    answer = explained.answer
    held = " (held back)" if answer.abstained else ""
    cut = " (cut off)" if explained.said.cut else ""
    made = (
        f"RAG-{answer.formulation.title()}, log p(y|x) {answer.log_likelihood:.3f}, p(y|x) "
        f"{exp(answer.log_likelihood):.3f}; snapshot {answer.snapshot_id or 'none'}, query encoder "
        f"{answer.encoder_fingerprint}, generator {answer.generator_fingerprint}"
    )
    return (
        f'<div class="openbook"><style>{STYLE}</style><h1>{escape(explained.question)}</h1>'
        f'<p class="answer">{escape(explained.text or "(empty)")}{held}{cut}</p><p class="soft">{escape(made)}</p>'
        f"{_passages(explained)}{_heat(explained)}</div>"
    )


def _passages(explained: Parts) -> str:
    rows = zip(explained.answer.evidence, explained.alone, strict=True)
    heads = ["", "passage", "score", "prior p(z|x)", "alone it says", "p of that", "p(y|x,z)", "posterior p(z|x,y)"]
    body = "".join(
        _row(
            f'<th scope="row">[{number}]</th>',
            f"<td><details><summary>{escape(each.passage.title or each.passage.text[:40])}</summary>"
            f"{escape(each.passage.text)}</details></td>",
            f'<td class="n">{each.score:.4f}</td>',
            _bar(exp(each.log_prior)),
            *_alone(alone),
            f'<td class="n">{_of_answer(explained, each)}</td>',
            _bar(exp(each.log_posterior)),
        )
        for number, (each, alone) in enumerate(rows, start=1)
    )
    return f"<h2>Passages</h2>{_table(heads, body)}"


def _alone(alone: Alone | InvalidRequest) -> tuple[str, str]:
    if isinstance(alone, InvalidRequest):
        return f'<td class="soft">{escape(f"cannot be read alone: {alone}")}</td>', '<td class="n">-</td>'
    return f"<td>{escape(alone.text or '(empty)')}</td>", f'<td class="n">{exp(alone.log_likelihood):.3f}</td>'


def _of_answer(explained: Parts, evidence: Evidence) -> str:
    log_p = explained.of_answer(evidence)
    return "" if log_p is None else f"{exp(log_p):.3f}"


def _heat(explained: Parts) -> str:
    words = explained.words
    if not words:
        return ""
    heads = ["", *(word.text.strip() for word in words)]
    likelihood = _row(
        '<th scope="row">p of the token</th>', *(f'<td class="n">{exp(word.log_likelihood):.2f}</td>' for word in words)
    )
    rows = "".join(
        _row(f'<th scope="row">[{number + 1}]</th>', *(_cell(word, number) for word in words))
        for number in range(len(explained.answer.evidence))
    )
    return f"<h2>How much of each token rests on each passage: p(z|x,y_&lt;=t)</h2>{_table(heads, likelihood + rows)}"


def _cell(word: Token, passage: int) -> str:
    p = exp(word.log_posterior[passage])
    return f'<td class="heat" style="--p:{p:.3f}">{p:.2f}</td>'


def _bar(p: float) -> str:
    return f'<td class="n">{p:.3f}<span class="bar" style="--p:{p:.3f}"></span></td>'


def _row(*cells: str) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _table(heads: Sequence[str], body: str) -> str:
    titles = "".join(_titles(heads))
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _titles(heads: Sequence[str]) -> Iterable[str]:
    return (f'<th scope="col">{escape(head)}</th>' if head else "<td></td>" for head in heads)
