"""An answer taken apart, asked of a pipeline in this process: the real one, with fakes that work behind it."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from itertools import accumulate, pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from openbook.cache.memory import MemoryCache
from openbook.cli import app
from openbook.config import AnswerDefaults
from openbook.core.context import Context
from openbook.core.types import (
    Decoding,
    Formulation,
    GenerationSettings,
    OwnPassage,
    Passage,
    ReplySettings,
    RetrievalSettings,
    RetrieverKind,
    Token,
)
from openbook.errors import InvalidConfig, InvalidRequest
from openbook.explain import Explanation, explain
from openbook.explain.parts import Alone
from openbook.explain.screen import print_explanation
from openbook.rag.answer import Answer, Label
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


def test_a_passage_is_read_alone_by_its_title_too_and_as_the_question_was_asked() -> None:
    asked: list[dict[str, Any]] = []

    class Noted(Local):
        def answer(self, question: str, **options: Any) -> Answer:
            asked.append(options)
            told = super().answer(question, k=options["k"], passages=options.get("passages", ()))
            return replace(told, log_likelihood=-float(len(asked)))

    how = {"formulation": Formulation.TOKEN, "seed": 7}
    search = {"k": 2, "without": [9], "retriever": RetrieverKind.BM25, "bm25_weight": 0.5, "follow": 2}
    search |= {"min_probability": 0.9, "min_confidence": 0.9}
    found = explain(Noted(), "who?", **how, **search)
    first, *alone = asked
    assert first == {**how, **search, "tokens": True}
    read = [OwnPassage(each.passage.text, each.passage.title) for each in found.answer.evidence]
    assert [each["passages"] for each in alone] == [[each] for each in read]
    for each in alone:
        assert {name: each[name] for name in how} == how
        assert [each[name] for name in search] == [0, None, RetrieverKind.DENSE, None, 0, 0.0, 0.0], (
            "nothing is searched for, and nothing held back"
        )
    assert [each.log_likelihood for each in found.alone if isinstance(each, Alone)] == [-2.0, -3.0]


def test_a_passage_that_cannot_be_read_alone_costs_its_own_cell() -> None:
    client = Local(AnswerDefaults(max_passage_chars=len(PASSAGES[0].text)))
    found = explain(client, "who patented the telephone?", k=3)
    assert found.answer.text == PASSAGES[0].text
    why = f"its text must have 1..{len(PASSAGES[0].text)} characters, got {len(PASSAGES[1].text)}"
    told = {
        each.passage.id: str(alone) if isinstance(alone, InvalidRequest) else alone.text
        for each, alone in zip(found.answer.evidence, found.alone, strict=True)
    }
    assert told == {0: PASSAGES[0].text, 1: why, 2: PASSAGES[2].text}
    assert f"cannot be read alone: {why}" in found.page()


def test_the_terminal_tells_once_which_passages_are_too_long_to_be_read_alone() -> None:
    found = explain(Local(AnswerDefaults(max_passage_chars=30)), "who patented the telephone?", k=3)
    numbers = [f"[{n}]" for n, each in enumerate(found.answer.evidence, start=1) if len(each.passage.text) > 30]
    console = Console(width=100, record=True, file=StringIO())
    print_explanation(found, console)
    (line,) = (line for line in console.export_text().splitlines() if "read alone" in line)
    assert len(numbers) == 2
    assert f"{', '.join(numbers)}: cannot be read alone: its text must have 1..30 characters " in line


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    no_file = "must be a file in a folder that exists"
    for page, why in (
        (tmp_path, no_file),
        (tmp_path / "none" / "page.html", no_file),
        (tmp_path / f"{'p' * 245}.html", "cannot be written: File name too long"),
    ):
        done = CliRunner().invoke(app, ["explain", "who?", "--html", str(page), "--server", "127.0.0.1:1"])
        assert isinstance(done.exception, InvalidConfig)
        assert str(done.exception) == f"{page}: {why}"


def test_the_command_takes_how_widely_to_search_and_how_candidates_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(_: object, question: str, **options: Any) -> Explanation:
        given.update(options)
        return explain(Local(), question, **options)

    given: dict[str, Any] = {}
    monkeypatch.setattr("openbook.explain.explanation.explain", local)
    options = ["--nprobe", "8", "--ef-search", "64", "--rerank-factor", "4", "--decoding", "fast"]
    CliRunner().invoke(app, ["explain", "who?", "--k", "2", *options], catch_exceptions=False)
    asked = {"nprobe": 8, "ef_search": 64, "rerank_factor": 4, "decoding": Decoding.FAST}
    assert asked.items() <= given.items()


def test_several_answers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="n_answers must be 1 for an explanation, got 2"):
        explain(Local(), "who?", n_answers=2)


def told_by_hand(words: Sequence[str] = ("Bell", " &"), formulation: Formulation = Formulation.SEQUENCE) -> Explanation:
    """Of two passages whose prior, posterior and likelihoods are all different, and a token without characters."""
    answer = explain(Local(), "who?", k=2).answer
    scores, priors, posteriors = (0.75, 0.25), (0.6, 0.4), (0.9, 0.1)
    evidence = tuple(
        replace(each, score=score, log_prior=log(prior), log_posterior=log(posterior))
        for each, score, prior, posterior in zip(answer.evidence, scores, priors, posteriors, strict=True)
    )
    ends = list(accumulate(map(len, words), initial=0))
    shares = tuple(map(log, (0.8, 0.2)))
    tokens = [Token(word, log(0.7), shares, *place) for word, place in zip(words, pairwise(ends), strict=True)]
    tokens.append(Token("", log(0.3), shares, ends[-1], ends[-1]))
    answer = replace(answer, log_likelihood=log(0.5), evidence=evidence, tokens=tuple(tokens), formulation=formulation)
    return Explanation("who?", answer, (Alone("Bell", log(0.55)), Alone("Curie", log(0.45))))


def test_the_page_shows_of_each_passage_its_numbers_under_their_names() -> None:
    page = told_by_hand().page()
    rows = re.findall(r'<th scope="row">\[\d\]</th><td><details>.*?</tr>', page)
    numbers = [re.findall(r"([.\d]+)<(?:/td|span)", row) for row in rows]
    # Score, prior, p of what it says alone, p of the answer under it by Bayes' rule, posterior.
    assert numbers == [["0.7500", "0.600", "0.550", "0.750", "0.900"], ["0.2500", "0.400", "0.450", "0.125", "0.100"]]
    heat = [
        re.findall(r">([.\d]+)</td>", row)
        for row in re.findall(r'<th scope="row">[^/]*</th><td class="(?:n|heat).*?</tr>', page)
    ]
    assert heat == [["0.70"] * 2, ["0.80"] * 2, ["0.20"] * 2], "a token without characters is no word"


def test_the_terminal_shows_of_each_passage_its_numbers_under_their_names() -> None:
    lines = [line.strip("│ ").split() for line in shown(told_by_hand(), 100).splitlines()]
    assert "p(y|x) 0.500" in " ".join(lines[2])
    first, second, *heat = [line for line in lines if line and line[0] in ("[1]", "[2]")]
    assert (first[1:3], first[-2:]) == (["0.600", "0.900"], ["Bell", "0.550"])
    assert (second[1:3], second[-2:]) == (["0.400", "0.100"], ["Curie", "0.450"])
    assert heat == [["[1]", "0.80", "0.80"], ["[2]", "0.20", "0.20"]]


def test_of_labels_or_by_token_no_passage_has_a_likelihood_of_its_own() -> None:
    explained = told_by_hand()
    labelled = replace(explained, answer=replace(explained.answer, labels=(Label("Bell", log(0.5), log(0.5)),)))
    for other in (labelled, told_by_hand(formulation=Formulation.TOKEN)):
        assert [other.of_answer(each) for each in other.answer.evidence] == [None, None]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_words_that_are_two_cells_a_letter_wide_are_shown_whole(width: int) -> None:
    words = ["アレクサンダー", "グラハム", "ベル"] * 5
    text = shown(told_by_hand(words), width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert [text.count(word) for word in words[:3]] == [5] * 3
    assert text.count("0.80") == len(words)


def shown(explained: Explanation, width: int) -> str:
    console = Console(width=width, record=True, file=StringIO())
    print_explanation(explained, console)
    return console.export_text()


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
    assert text.count("the Moo") == 2, "without a title it is known by its text"
    for number in range(1, len(PASSAGES) + 1):
        assert sum(f"[{number}]" in line for line in lines) >= 2
