"""An answer taken apart, asked of a pipeline in this process: the real one, with fakes that work behind it."""

import asyncio
from html.parser import HTMLParser
from io import StringIO
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from openbook.cache.memory import MemoryCache
from openbook.cli import app
from openbook.config import AnswerDefaults
from openbook.core.context import Context
from openbook.core.types import Formulation, GenerationSettings, Passage, ReplySettings, RetrievalSettings
from openbook.errors import InvalidConfig, InvalidRequest
from openbook.explain import Explanation, explain
from openbook.explain.screen import print_explanation
from openbook.rag.answer import Answer
from openbook.rag.pipeline import Pipeline
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder

PASSAGES = [
    Passage(0, "bell", "Telephone", "Bell patented the telephone in 1876"),
    Passage(1, "curie", "Marie <Curie>", "Curie & Bell were born <b>somewhere</b>"),
    Passage(2, "moon", "", "the Moon goes around the Earth"),
]


class Local:
    """A client without a network, which counts."""

    def __init__(self, limits: AnswerDefaults | None = None) -> None:
        encoder = HashEncoder()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        self._pipeline = Pipeline(encoder, index, index, EchoGenerator(), MemoryCache(9), limits or AnswerDefaults())
        self.n_asked = 0

    def answer(self, question: str, **options: Any) -> Answer:
        self.n_asked += 1
        given = {name: value for name, value in options.items() if value is not None}
        own = given.pop("passages", ())
        kinds = (RetrievalSettings, GenerationSettings, ReplySettings)
        retrieval, generation, reply = (
            kind(**{name: value for name, value in given.items() if name in kind.__dataclass_fields__})
            for kind in kinds
        )
        asked = self._pipeline.answer(question, retrieval, generation, Context(), reply, own)  # type: ignore[arg-type]
        return asyncio.run(asked)


@pytest.fixture(scope="module")
def explained() -> Explanation:
    return explain(Local(), "who patented the <telephone>?", k=3)


def test_every_passage_says_what_it_would_alone(explained: Explanation) -> None:
    assert [alone.text for alone in explained.alone] == [each.passage.text for each in explained.answer.evidence]
    client = Local()
    explain(client, "who?", k=2)
    assert client.n_asked == 3


def test_words_are_the_tokens_of_the_answer_and_their_passages_sum_to_one(explained: Explanation) -> None:
    assert "".join(word.text for word in explained.words) == explained.answer.text
    for word in explained.words:
        assert np.exp(word.log_posterior).sum() == pytest.approx(1)


def test_the_likelihood_under_a_passage_is_bayes_rule(explained: Explanation) -> None:
    for each in explained.answer.evidence:
        found = explained.of_answer(each)
        assert found is not None
        assert each.log_prior + found - explained.answer.log_likelihood == pytest.approx(each.log_posterior)
    by_token = explain(Local(), "who?", k=1, formulation=Formulation.TOKEN)
    assert by_token.of_answer(by_token.answer.evidence[0]) is None


def test_an_answer_held_back_is_explained_too() -> None:
    class Unsure(Local):
        def answer(self, question: str, **options: Any) -> Answer:
            found = super().answer(question, **options)
            return found if options.get("min_probability") == 0 else told_back(found)

    found = explain(Unsure(), "who patented the telephone?", k=2)
    assert (found.answer.text, found.text) == ("", PASSAGES[0].text)
    assert found.words
    assert "(held back)" in found.page()


@pytest.mark.parametrize("limit", [2, 9])
@pytest.mark.parametrize("held", [True, False])
def test_an_answer_that_did_not_end_by_itself_is_marked(limit: int, held: bool) -> None:
    class Unsure(Local):
        def answer(self, question: str, **options: Any) -> Answer:
            found = super().answer(question, **options)
            return told_back(found) if held else found

    found = explain(Unsure(), "who patented the telephone?", k=2, max_new_tokens=limit)
    console = Console(width=100, record=True, file=StringIO())
    print_explanation(found, console)
    assert ["(cut off)" in shown for shown in (console.export_text(), found.page())] == [limit == 2] * 2


def told_back(answer: Answer) -> Answer:
    from dataclasses import replace

    from openbook.rag.answer import Alternative

    posterior = tuple(each.log_posterior for each in answer.evidence)
    would_be = Alternative(answer.text, answer.log_likelihood, posterior, answer.tokens, answer.citations, answer.cut)
    return replace(answer, text="", tokens=(), citations=(), cut=False, answers=(would_be,), abstained=True)


def test_each_passage_says_what_it_would_however_sure_the_answer_is_to_be() -> None:
    asked: list[Any] = []

    class Sure(Local):
        def answer(self, question: str, **options: Any) -> Answer:
            asked.append(options.pop("min_confidence"))
            return super().answer(question, **options)

    explain(Sure(), "who?", k=2, min_confidence=0.9)
    assert asked == [0.9, 0.0, 0.0]


def test_a_passage_that_cannot_be_read_alone_costs_its_own_cell() -> None:
    client = Local(AnswerDefaults(max_passage_chars=len(PASSAGES[0].text)))
    found = explain(client, "who patented the telephone?", k=3)
    assert found.answer.text == PASSAGES[0].text
    why = f"passages[0].text must have 1..{len(PASSAGES[0].text)} characters, got {len(PASSAGES[1].text)}"
    told = {
        each.passage.id: str(alone) if isinstance(alone, InvalidRequest) else alone.text
        for each, alone in zip(found.answer.evidence, found.alone, strict=True)
    }
    assert told == {0: PASSAGES[0].text, 1: why, 2: PASSAGES[2].text}
    assert why in found.page()
    console = Console(width=100, record=True, file=StringIO())
    print_explanation(found, console)
    assert why in console.export_text()


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    for page in (tmp_path, tmp_path / "missing" / "page.html"):
        done = CliRunner().invoke(app, ["explain", "who?", "--html", str(page), "--server", "127.0.0.1:1"])
        assert isinstance(done.exception, InvalidConfig)
        assert str(done.exception) == f"--html must be a file in a folder that exists, got {page}"


def test_several_answers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="n_answers must be 1 for an explanation, got 2"):
        explain(Local(), "who?", n_answers=2)


class Seen(HTMLParser):
    """The texts of a page, its elements, and what it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_whole_by_itself_and_shows_texts_as_texts(explained: Explanation) -> None:
    page = explained.page()
    seen = Seen(page)
    assert seen.loads == []
    assert {"script", "b", "curie", "telephone", "link"}.isdisjoint(seen.tags)
    assert "url(" not in page
    texts = "\n".join(seen.texts)
    for passage in PASSAGES:
        assert passage.text in texts
    assert "who patented the <telephone>?" in texts
    k, n_words = len(PASSAGES), len(explained.words)
    assert page.count('class="heat"') == k * n_words
    best = explained.answer.evidence[0]
    assert f"{exp(best.log_posterior):.3f}" in page
    assert explained._repr_html_() in page


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_terminal_shows_every_passage_and_every_word(explained: Explanation, width: int) -> None:
    console = Console(width=width, record=True, file=StringIO())
    print_explanation(explained, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    for word in explained.words:
        assert word.text.strip() in text
    lines = text.splitlines()
    for number in range(1, len(PASSAGES) + 1):
        assert sum(f"[{number}]" in line for line in lines) >= 2
