"""Table 5: how varied answers are: of all their tri-grams, the share that differs from one another."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from openbook.core.metrics import count_n_grams, distinct_n_grams
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
    "The more is said, the lower it is, and who says little repeats little. So the second table has what is to be "
    "expected of equally many tri-grams of each, drawn at random: as many as who says least of the row has. Where "
    "answers have one or two words, few tri-grams are left to count: their number stands beside.",
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
    of_as_many = _of_as_many(together)
    return Report(
        title="How varied the answers are",
        about=ABOUT,
        command=command,
        made_of=asked.made_of,
        expected=[
            Expected(f"distinct tri-grams of {each.name}, less those of the closed book, of equally many",
                     of_as_many[each.name] - of_as_many[CLOSED_BOOK.name], 0.0, 1.0)
            for each in (TOKEN, SEQUENCE)
        ],
        tables=[
            Table(
                "Distinct tri-grams, per cent of all",
                ("questions", "n", *names),
                _rows(texts, _tri_grams),
                about="In brackets: how many runs of three words there are.",
            ),
            Table(
                "Distinct tri-grams of equally many, per cent",
                ("questions", "n", *names),
                _rows(texts, lambda of_file: map(share, _of_as_many(of_file).values())),
            ),
            Table("Different answers, per cent of all", ("questions", "n", *names), _rows(texts, _different)),
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
    texts = {each.name: [one.record.prediction for one in asked.of(each, file) if one.record.answers]
             for each in VARIANTS}  # fmt: skip
    return {GOLD: [one.record.answers[0] for one in asked.of(SEQUENCE, file) if one.record.answers], **texts}


def _of_as_many(of_file: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """The distinct tri-grams of each, of as many as who says least has."""
    fewest = min(count_n_grams(of_one).total() for of_one in of_file.values())
    return {name: distinct_n_grams(of_one, among=fewest) for name, of_one in of_file.items()}


def _rows(
    texts: Mapping[str, Mapping[str, Sequence[str]]], shown: Callable[[Mapping[str, Sequence[str]]], Iterable[str]]
) -> list[list[Cell]]:
    return [[file, str(len(of_file[GOLD])), *shown(of_file)] for file, of_file in texts.items()]


def _tri_grams(of_file: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{share(distinct_n_grams(each))} ({count_n_grams(each).total()})" for each in of_file.values()]


def _different(of_file: Mapping[str, Sequence[str]]) -> list[str]:
    # answers that are regular expressions are none
    return [share(len(set(each)) / len(each)) if each else "–" for each in of_file.values()]


def _most(texts: Mapping[str, Sequence[str]]) -> list[list[Cell]]:
    return [
        [name, text, str(times)] for name, of_all in texts.items() for text, times in Counter(of_all).most_common(5)
    ]
