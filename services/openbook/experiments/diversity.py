"""Table 5: how varied answers are: of all their tri-grams, the share that differs from one another."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from openbook.core.metrics import distinct_n_grams
from openbook.evaluation.settings import EvaluationSettings
from openbook.experiments.asking import CLOSED_BOOK, SEQUENCE, TOKEN, Asked, OnProgress, ask
from openbook.experiments.report import Cell, Expected, Report, Table, share

Settings = EvaluationSettings
DATA = ("squad-dev", "entityquestions-dev", "webquestions-test")
VARIANTS = (CLOSED_BOOK, TOKEN, SEQUENCE)
GOLD = "gold"

ABOUT = (
    "A generator without passages says the same phrases again and again; one that reads says what it has read. "
    "Measured is the number of different tri-grams of all answers together, divided by the number of all of them, "
    "without any decoding that would promote variety. Gold are the first of the right answers.",
    "The more texts, the lower it is: compare columns of one row, which are of the same questions. Where answers "
    "have one or two words, few tri-grams are left to count: their number stands beside.",
)
PAPER = (
    ("MS MARCO", "89.6", "70.7", "77.8", "83.5"),
    ("Jeopardy question generation", "90.0", "32.4", "46.8", "53.8"),
)


def run(settings: EvaluationSettings, command: str, on_progress: OnProgress) -> Report:
    """Ask with passages and without. Raises OpenbookError as `ask`."""
    asked = ask(settings, VARIANTS, on_progress)
    texts = {file: _texts(asked, file) for file in asked.files}
    names = (GOLD, *(each.name for each in VARIANTS))
    together = {name: [text for of_file in texts.values() for text in of_file[name]] for name in names}
    if len(texts) > 1:
        texts["all"] = together
    found = {name: distinct_n_grams(of_all) for name, of_all in together.items()}
    return Report(
        title="How varied the answers are",
        about=ABOUT,
        command=command,
        made_of=asked.made_of,
        expected=[
            Expected(f"distinct tri-grams of {each.name}, less those of the closed book",
                     found[each.name] - found[CLOSED_BOOK.name], 0.0, 1.0)
            for each in (TOKEN, SEQUENCE)
        ],
        tables=[
            Table(
                "Distinct tri-grams, per cent of all",
                ("questions", "n", *names),
                _rows(texts, names, _tri_grams),
                about="In brackets: how many runs of three words there are, words being what stands between spaces.",
            ),
            Table("Different answers, per cent of all", ("questions", "n", *names), _rows(texts, names, _different)),
            Table(
                "The paper's Table 5: distinct tri-grams, per cent",
                ("", GOLD, "BART, closed book", TOKEN.name, SEQUENCE.name),
                PAPER,
            ),
            Table("What was said most often", ("by", "answer", "times"), _most(together), hidden=True),
        ],
        plan=asked.lasting_plan,
        numbers={f"distinct tri-grams, {name}": value for name, value in found.items()},
    )  # fmt: skip


def _texts(asked: Asked, file: str) -> dict[str, list[str]]:
    """Of questions whose answers are texts."""
    texts = {each.name: [one.record.prediction for one in asked.of(each, file) if one.question.answers]
             for each in VARIANTS}  # fmt: skip
    return {GOLD: [one.question.answers[0] for one in asked.of(SEQUENCE, file) if one.question.answers], **texts}


def _rows(
    texts: Mapping[str, Mapping[str, Sequence[str]]], names: Sequence[str], shown: Callable[[Sequence[str]], str]
) -> list[list[Cell]]:
    return [
        [file, str(len(of_file[GOLD])), *(shown(of_file[name]) for name in names)] for file, of_file in texts.items()
    ]


def _tri_grams(texts: Sequence[str]) -> str:
    n_tri_grams = sum(max(0, len(text.split()) - 2) for text in texts)
    return f"{share(distinct_n_grams(texts))} ({n_tri_grams})"


def _different(texts: Sequence[str]) -> str:
    return share(len(set(texts)) / len(texts)) if texts else "–"  # answers that are regular expressions are none


def _most(texts: Mapping[str, Sequence[str]], n: int = 5) -> list[list[Cell]]:
    return [
        [name, text, str(times)] for name, of_all in texts.items() for text, times in Counter(of_all).most_common(n)
    ]
