"""Table 1: exact match on open-domain questions, with passages and without (Lewis et al. 2020, section 4.1)."""

from openbook.evaluation.settings import EvaluationSettings
from openbook.experiments.asking import CLOSED_BOOK, OPEN_DOMAIN, SEQUENCE, TOKEN, Asked, OnProgress, ask, em, found_at
from openbook.experiments.report import Cell, Expected, Report, Table

Settings = EvaluationSettings
DATA = OPEN_DOMAIN
VARIANTS = (CLOSED_BOOK, TOKEN, SEQUENCE)
TITLES = ("questions", "n", *(each.name for each in VARIANTS))
RANKS = (1, 5, 20)
SHOWN = 30
"""Questions of each file that the page lists."""

ABOUT = (
    "Every question is asked three times of one generator: with no passage at all, and with the passages that the "
    "retriever found, marginalised out per token and per sequence. An answer is right if it equals a known one, "
    "case, punctuation and articles apart, or matches the regular expression (CuratedTrec).",
    "What a memory of passages brings is the difference to the closed book. What it can bring is bounded by "
    "retrieval: beside every exact match stands how often one of the passages holds an answer string.",
)
PAPER = (
    ("T5-11B, closed book", "34.5", "–", "37.4", "–"),
    ("T5-11B + SSM, closed book", "36.6", "–", "44.7", "–"),
    ("DPR, extractive", "41.5", "57.9", "41.1", "50.6"),
    ("RAG-Token", "44.1", "55.2", "45.5", "50.0"),
    ("RAG-Sequence", "44.5", "56.8", "45.2", "52.2"),
)


def run(settings: EvaluationSettings, command: str, on_progress: OnProgress) -> Report:
    """Ask every file of questions. Raises OpenbookError as `ask`."""
    asked = ask(settings, VARIANTS, on_progress)
    return Report(
        title="Open-domain question answering",
        about=ABOUT,
        command=command,
        made_of=asked.made_of,
        expected=[
            Expected(
                f"exact match of {each.name} beyond the closed book, lower end of the interval",
                asked.difference(each, CLOSED_BOOK, em).low,
                0.0,
                1.0,
            )
            for each in (TOKEN, SEQUENCE)
        ],
        tables=[
            Table("Exact match, per cent", TITLES, asked.rows(VARIANTS, em)),
            Table("F1 of the words, per cent", TITLES, asked.rows(VARIANTS, lambda record: record.f1)),
            _retrieval(asked, settings.k),
            Table(
                "The paper's Table 1: exact match over 21 million passages of Wikipedia",
                ("", "Natural Questions", "TriviaQA", "WebQuestions", "CuratedTrec"),
                PAPER,
                about="DPR and BART-large, 626 million parameters, trained for each data set: to be compared in kind.",
            ),
            Table(
                f"Questions and answers, the first {SHOWN} of each file",
                ("file", "question", "right", *(each.name for each in VARIANTS)),
                [row for file in asked.files for row in _said(asked, file)],
                hidden=True,
            ),
        ],
        plan=asked.lasting_plan,
        numbers={
            f"exact match, {file}, {each.name}": asked.mean(each, em, file).value
            for file in asked.files
            for each in VARIANTS
        },
    )


def _retrieval(asked: Asked, k: int) -> Table:
    rows: list[list[Cell]] = []
    for file in asked.files:
        recall = [asked.mean(SEQUENCE, found_at(at), file) for at in RANKS]
        read = asked.mean(SEQUENCE, lambda record: em(record) if record.has_answer_at(k) else None, file)
        unread = asked.mean(SEQUENCE, lambda record: None if record.has_answer_at(k) else em(record), file)
        rows.append([file, *recall, read, unread])
    found = (f"an answer in the first {at}" for at in RANKS)
    titles = ("questions", *found, "right if one was read", "right if none was")
    return Table("Retrieval, and RAG-Sequence given what it read, per cent", titles, rows)


def _said(asked: Asked, file: str) -> list[list[Cell]]:
    answers = [[each.record for each in asked.of(variant, file)[:SHOWN]] for variant in VARIANTS]
    return [
        [
            file,
            of_all[0].question,
            " / ".join(of_all[0].answers) or (of_all[0].answer_regex or ""),
            *(f"{'✓ ' if each.em else ''}{each.prediction}" for each in of_all),
        ]
        for of_all in zip(*answers, strict=True)
    ]
