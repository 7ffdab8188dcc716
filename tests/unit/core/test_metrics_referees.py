"""10,000 random answers beside what the benchmarks score with: SQuAD's script, sacreBLEU, rouge-score, DPR's tokens."""

import random
import re
import string
import unicodedata
from collections import Counter
from itertools import combinations
from math import exp, nan

import pytest
import regex
import sacrebleu
from numpy.testing import assert_allclose

from openbook.core import metrics
from openbook.core.answerability import FUNCTION, q_bleu_1

N = 10_000
PIECES = [
    *[
        "the",
        "a",
        "An",
        "cat",
        "Cat's",
        "sat",
        "mat.",
        "Dog!",
        "U.S.",
        "1,000",
        "naïve",
        "Beyonce\u0301",
        "“so”",
        "-",
        "—",
    ],
    *["the.cat", "snake_case", "zero\u200bwidth", "東京", "the  ", "\t", "a-b", "$5", "İ", "ﬁn", "x²", "\u00a0"],
]
WORDS = ["cat", "dog", "sat", "mat", "on", "ran", "red"]


def texts(draw: random.Random, most: int, pieces: list[str] = PIECES, least: int = 0) -> str:
    return " ".join(draw.choices(pieces, k=draw.randint(least, most)))


def squad_normalised(text: str) -> str:
    """The four steps of SQuAD v1.1's script."""
    lowered = text.lower()
    unpunctuated = "".join(ch for ch in lowered if ch not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", unpunctuated).split())


def squad_f1(prediction: str, answer: str) -> float:
    """As SQuAD v2.0's script, which says what nothing is worth against nothing."""
    of_prediction, of_answer = squad_normalised(prediction).split(), squad_normalised(answer).split()
    if not of_prediction or not of_answer:
        return float(of_prediction == of_answer)
    n_same = sum((Counter(of_prediction) & Counter(of_answer)).values())
    if n_same == 0:
        return 0.0
    precision, recall = n_same / len(of_prediction), n_same / len(of_answer)
    return 2 * precision * recall / (precision + recall)


def test_exact_match_and_f1_are_those_of_squad() -> None:
    draw = random.Random(0)
    n_right = 0
    for _ in range(N):
        prediction, answers = texts(draw, 3), [texts(draw, 3) for _ in range(draw.randint(1, 3))]
        right = max(squad_normalised(prediction) == squad_normalised(answer) for answer in answers)
        assert metrics.exact_match(prediction, answers) is right
        assert metrics.f1(prediction, answers) == pytest.approx(max(squad_f1(prediction, each) for each in answers))
        n_right += right
    assert N // 100 < n_right < N // 2


def test_has_answer_is_that_of_dpr() -> None:
    """Its SimpleTokenizer by the very regular expression, and its comparison of slices."""
    tokens = regex.compile(r"([\p{L}\p{N}\p{M}]+)|([^\p{Z}\p{C}])", regex.IGNORECASE | regex.UNICODE | regex.MULTILINE)

    def tokenized(text: str) -> list[str]:
        return [match.group().lower() for match in tokens.finditer(unicodedata.normalize("NFD", text))]

    draw = random.Random(1)
    n_held = 0
    for _ in range(N):
        passage, answer = texts(draw, 12), texts(draw, 2, least=1)
        words, wanted = tokenized(passage), tokenized(answer)
        held = bool(wanted) and any(words[i : i + len(wanted)] == wanted for i in range(len(words) - len(wanted) + 1))
        assert metrics.has_answer(passage, [answer]) is held
        n_held += held
    assert N // 10 < n_held < N * 9 // 10


@pytest.mark.parametrize("order", [1, 2, 4])
def test_bleu_is_that_of_sacrebleu(order: int) -> None:
    referee = sacrebleu.BLEU(max_ngram_order=order, smooth_method="none", tokenize="none", force=True)
    draw = random.Random(order)
    ours, theirs = [], []
    for _ in range(N // 10):
        n_answers = draw.randint(1, 3)
        predictions = [texts(draw, 9, WORDS, least=1) for _ in range(10)]
        answers = [[texts(draw, 9, WORDS, least=1) for _ in range(n_answers)] for _ in predictions]
        ours.append(metrics.bleu(predictions, answers, order))
        streams = [list(stream) for stream in zip(*answers, strict=True)]
        theirs.append(referee.corpus_score(predictions, streams).score / 100)
    assert_allclose(ours, theirs, atol=1e-9)
    assert max(ours) > 0.1


def test_rouge_l_is_that_of_rouge_score() -> None:
    from rouge_score.rouge_scorer import RougeScorer  # half a second, which not everyone who collects tests shall wait

    referee = RougeScorer(["rougeL"])
    draw = random.Random(3)
    for _ in range(N):
        prediction, answers = texts(draw, 8, WORDS), [texts(draw, 8, WORDS) for _ in range(draw.randint(1, 2))]
        scores = [referee.score(answer, prediction)["rougeL"] for answer in answers]
        assert metrics.rouge_l(prediction, answers[:1], beta=1.0) == pytest.approx(scores[0].fmeasure)
        precision, recall = max(score.precision for score in scores), max(score.recall for score in scores)
        weight = metrics.ROUGE_BETA**2  # as MS MARCO combines several answers
        combined = (1 + weight) * precision * recall / (recall + weight * precision) if precision and recall else 0.0
        assert metrics.rouge_l(prediction, answers) == pytest.approx(combined)


def test_distinct_n_grams_by_hand() -> None:
    assert metrics.distinct_n_grams(["a b c d", "A b, c!", "x y"]) == pytest.approx(2 / 3)
    assert metrics.distinct_n_grams(["a a", "a"], n=1) == pytest.approx(1 / 3)
    assert metrics.distinct_n_grams(["a b"]) is nan
    assert metrics.distinct_n_grams(["a b"], among=2) is nan


def test_distinct_n_grams_of_fewer_are_the_mean_of_all_draws() -> None:
    draw = random.Random(5)
    for _ in range(50):
        words = draw.choices("abcd", k=draw.randint(1, 8))
        for among in range(1, len(words) + 2):
            draws = list(combinations(words, min(among, len(words))))
            mean = sum(len(set(each)) / len(each) for each in draws) / len(draws)
            assert metrics.distinct_n_grams([" ".join(words)], n=1, among=among) == pytest.approx(mean)


def test_a_label_is_right_letter_for_letter() -> None:
    assert metrics.label_accuracy(" SUPPORTS ", ["SUPPORTS"])
    assert not metrics.label_accuracy("supports", ["SUPPORTS"])
    assert not metrics.label_accuracy("SUPPORTS", [])


ASKED = ["What", "what", "team", "Who", "who", "won", "the", "Cup", "in", "Poland", "first", "of", "river", "The"]


def test_q_bleu_1_is_that_of_its_authors() -> None:
    """Their script written out: words of four kinds, F1 of both directions' BLEU-1 of each, weighed, and BLEU-1."""
    asking = {"what", "which", "why", "who", "whom", "whose", "where", "when", "how"}

    def kinds(question: str) -> list[list[str]]:
        words = question.split()
        of_type = []
        for i, word in enumerate(words):
            if word in asking or word in {each.capitalize() for each in asking}:
                of_type.append(word)
                if word.lower() in ("what", "which") and i + 1 < len(words):
                    of_type.append(words[i + 1])
        relevant = [w for w in words if w not in of_type and not w[0].isupper() and w not in FUNCTION]
        rest = words[1:] if words and words[0].lower() in asking else words
        function = [w for w in words if w.lower() in FUNCTION]
        return [[w for w in rest if w[0].isupper()], of_type, relevant, function]

    def bleu(said: list[str], right: list[str]) -> float:
        same = (Counter(map(str.lower, said)) & Counter(map(str.lower, right))).total()
        return same / len(said) * min(1.0, exp(1 - len(right) / len(said))) if same else 0.0

    draw = random.Random(4)
    found = []
    for _ in range(N):
        said, right = texts(draw, 8, ASKED), texts(draw, 8, ASKED, least=1)
        score = 0.3 * bleu(said.split(), right.split())
        for weight, ours, theirs in zip((0.6, 0.2, 0.1, 0.1), kinds(said), kinds(right), strict=True):
            precision, recall = bleu(ours, theirs), bleu(theirs, ours)
            score += 0.7 * weight * (2 * precision * recall / (precision + recall) if precision and recall else 0)
        assert q_bleu_1(said, [right]) == pytest.approx(score)
        found.append(score)
    assert max(found) > 0.8 > 0.1 > min(found)
    assert q_bleu_1("Who won?", ["Who lost?", "Who won?"]) == pytest.approx(q_bleu_1("Who won?", ["Who won?"]))


def test_wilsons_interval_by_hand() -> None:
    """Of Wilson 1927 as in the textbooks: 0 of 20, 10 of 20, all of 20."""
    assert metrics.wilson_interval(0, 20) == pytest.approx((0.0, 0.16113), abs=1e-5)
    assert metrics.wilson_interval(10, 20) == pytest.approx((0.29930, 0.70070), abs=1e-5)
    assert metrics.wilson_interval(20, 20) == pytest.approx((0.83887, 1.0), abs=1e-5)
    assert metrics.wilson_interval(0, 0) == (pytest.approx(nan, nan_ok=True),) * 2
