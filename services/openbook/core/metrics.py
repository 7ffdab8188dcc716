"""What an answer is worth, and what the model's own confidence in it is worth.

Answers are compared as the benchmarks do it: SQuAD's exact match and F1, CuratedTrec's regular expressions, DPR's "a
passage holds the answer" (section 3.1), ROUGE-L and BLEU-1 for answers that are sentences (sections 3.2 and 3.3).
Shapes: n answers. Confidences, and which of them are correct, raise InvalidRequest where they are not (n,) each or a
confidence is NaN.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, nan, prod

import numpy as np
from numpy.typing import ArrayLike

from openbook.core.tokens import joined, words_of
from openbook.core.types import Float64, Int64
from openbook.errors import InvalidRequest

ROUGE_BETA = 1.2
"""How much more recall counts than precision in ROUGE-L: the value of MS MARCO's own evaluation."""

_RESAMPLED_AT_ONCE = 1 << 16  # values: more would not be faster, and not fit a processor's caches
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """As SQuAD: lower case, ASCII punctuation deleted, articles to a space, white space to single spaces, in turn."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Whether it is one of the answers, once both are normalised."""
    return normalise(prediction) in map(normalise, answers)


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the normalised words, 0..1, for the answer where it is highest.

    Where normalisation leaves nothing of either, it is 1 if it leaves nothing of both.
    """
    return max((_f1(normalise(prediction).split(), normalise(answer).split()) for answer in answers), default=0.0)


def _f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    if not prediction or not answer:
        return float(prediction == answer)
    n_common = (Counter(prediction) & Counter(answer)).total()
    return 2 * n_common / (len(prediction) + len(answer))


def regex_match(text: str, pattern: str) -> bool:
    """Whether the pattern is found anywhere in it, as CuratedTrec is scored: any case, `^` and `$` at every line."""
    return _compiled(pattern).search(text) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE)


def has_answer(passage: str, answers: Sequence[str]) -> bool:
    """Whether the tokens of an answer stand in the passage, one after the other, as DPR counts.

    Unlike DPR's, an answer without tokens stands nowhere: see `openbook.core.tokens`.
    """
    return holding(answers)(passage)


def holding(answers: Sequence[str]) -> Callable[[str], bool]:
    """`has_answer` of these answers, for many passages: the answers' tokens are found once, however many they are."""
    looked_for = [answer for answer in map(joined, answers) if len(answer) > 1]

    def holds(passage: str) -> bool:
        text = joined(passage)
        return any(answer in text for answer in looked_for)

    return holds


def has_regex_answer(passage: str, pattern: str) -> bool:
    """Whether the passage holds an answer to a question whose answers are a regular expression, as DPR counts.

    It compares in Unicode's form NFD; a pattern that is none any more in that form, such as an escaped é, is nowhere.
    """
    try:
        return regex_match(unicodedata.normalize("NFD", passage), unicodedata.normalize("NFD", pattern))
    except re.error:
        return False


def rouge_l(prediction: str, answers: Sequence[str], beta: float = ROUGE_BETA) -> float:
    """ROUGE-L, 0..1: how much of the words stands in both in the same order (the longest common subsequence).

    As in MS MARCO's evaluation precision and recall are each of the answer where they are best.
    """
    words = words_of(prediction)
    common = [(_n_common_in_order(words, answer), len(answer)) for answer in map(words_of, answers)]
    if not words or not any(n for n, _ in common):
        return 0.0
    precision = max(n / len(words) for n, _ in common)
    recall = max(n / length for n, length in common if length)
    return (1 + beta**2) * precision * recall / (recall + beta**2 * precision)


def bleu_1(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """BLEU of single words alone: `bleu` of order 1."""
    return bleu(predictions, answers, order=1)


def bleu(predictions: Sequence[str], answers: Sequence[Sequence[str]], order: int = 4) -> float:
    """BLEU of a corpus, 0..1: the share of predicted n-grams that stand in an answer, each as often as in one of them
    at most, as geometric mean over n = 1..order, and less where the predictions are shorter than the answers closest
    to them in length. Not a mean over questions, and not smoothed; NaN for no predictions.
    """
    if not predictions:
        return nan
    n_matches, n_predicted = [0] * order, [0] * order
    n_words = n_answer = 0
    for prediction, of_question in zip(predictions, answers, strict=True):
        words, references = words_of(prediction), [words_of(answer) for answer in of_question]
        for i in range(order):
            most: Counter[tuple[str, ...]] = Counter()
            for reference in references:
                most |= Counter(_n_grams(reference, i + 1))
            predicted = Counter(_n_grams(words, i + 1))
            n_matches[i] += (predicted & most).total()
            n_predicted[i] += predicted.total()
        n_words += len(words)
        n_answer += min(map(len, references), key=lambda n: (abs(n - len(words)), n), default=0)
    if not all(n_matches):
        return 0.0
    log_precision = np.log(np.array(n_matches) / n_predicted).mean()
    return float(min(1.0, exp(1 - n_answer / n_words)) * exp(log_precision))


def distinct_n_grams(texts: Sequence[str], n: int = 3, among: int | None = None) -> float:
    """Of all n-grams of all texts the share that differs from one another, as the paper's Table 5 has it for n = 3.

    The more n-grams, the lower: compare equally many. With `among` it is the share to be expected of so many of them,
    drawn at random without replacement; of all where there are no more. NaN where there are none.
    """
    times = count_n_grams(texts, n)
    total = times.total()
    drawn = total if among is None else min(among, total)
    missed = sum(prod((total - drawn - i) / (total - i) for i in range(count)) for count in times.values())
    return (len(times) - missed) / drawn if drawn else nan


def count_n_grams(texts: Sequence[str], n: int = 3) -> Counter[tuple[str, ...]]:
    """How often each n-gram occurs in all texts together."""
    return Counter(n_gram for text in texts for n_gram in _n_grams(words_of(text), n))


def label_accuracy(prediction: str, labels: Sequence[str]) -> bool:
    """Whether it is one of the right labels, letter for letter but for white space around it, as KILT counts."""
    return prediction.strip() in map(str.strip, labels)


def _n_grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def _n_common_in_order(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


@dataclass(frozen=True, slots=True)
class Reliability:
    """Confidence against correctness, in bins of equal width over 0..1. Bins without answers hold NaN."""

    edges: Float64  # (bins + 1,)
    counts: Int64  # (bins,)
    confidence: Float64  # (bins,) mean
    accuracy: Float64  # (bins,) share that is right

    @property
    def expected_error(self) -> float:
        """Expected calibration error: mean over the answers of |accuracy - confidence| of their bin. NaN for none."""
        if not self.counts.any():
            return nan
        gaps = np.nan_to_num(np.abs(self.accuracy - self.confidence))
        return float((gaps * self.counts).sum() / self.counts.sum())


def reliability(confidence: ArrayLike, correct: ArrayLike, n_bins: int = 10) -> Reliability:
    """Of (n,) confidences in 0..1 and whether each answer was right, or how right, 0..1."""
    p, right = _paired(confidence, correct)
    bins = np.minimum((p * n_bins).astype(np.int64), n_bins - 1)
    counts = np.bincount(bins, minlength=n_bins)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(bins, weights=values, minlength=n_bins) / counts for values in (p, right)]
    return Reliability(np.linspace(0.0, 1.0, n_bins + 1), counts, *means)


def auroc(confidence: ArrayLike, correct: ArrayLike) -> float:
    """The probability that a right answer has more confidence than a wrong one, ties counting half.

    NaN where all (n,) are right, or all wrong.
    """
    p, right = _paired(confidence, correct)
    n_right = int(right.sum())
    n_wrong = len(right) - n_right
    if not n_right or not n_wrong:
        return nan
    _, place, counts = np.unique(p, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # of tied ones the mean, from 1
    return float(((ranks * right).sum() - n_right * (n_right + 1) / 2) / (n_right * n_wrong))


@dataclass(frozen=True, slots=True)
class RiskCoverage:
    """What comes of answering only where the confidence is high enough. m different confidences, highest first."""

    threshold: Float64  # (m,) answers with at least this confidence are given
    coverage: Float64  # (m,) their share of all
    risk: Float64  # (m,) the share of them that is wrong


def risk_coverage(confidence: ArrayLike, correct: ArrayLike) -> RiskCoverage:
    """Of (n,) confidences on any scale, such as log p(y|x), and whether each answer was right."""
    p, right = _paired(confidence, correct)
    order = np.argsort(-p, kind="stable")
    p, right = p[order], right[order]
    last = np.flatnonzero(p[1:] != p[:-1])  # no threshold parts what has equal confidence
    last = np.append(last, len(p) - 1)[: len(p)]
    n_given = last + 1
    return RiskCoverage(p[last], n_given / len(p), 1.0 - np.cumsum(right)[last] / n_given)


def _paired(confidence: ArrayLike, correct: ArrayLike) -> tuple[Float64, Float64]:
    p, right = np.asarray(confidence, np.float64), np.asarray(correct, np.float64)
    if p.ndim != 1 or p.shape != right.shape or np.isnan(p).any():
        raise InvalidRequest(f"confidence and correct must be (n,) numbers, got shapes {p.shape} and {right.shape}")
    return p, right


def wilson_interval(n_right: int, n: int) -> tuple[float, float]:
    """Between what limits a share lies of which n_right of n were seen (Wilson 1927); 95 %.

    Other than the bootstrap's, it does not vanish where all are right, or none. NaN for n = 0.
    """
    if not n:
        return nan, nan
    p, z = n_right / n, 1.959964
    middle, half = p + z * z / (2 * n), z * ((p * (1 - p) + z * z / (4 * n)) / n) ** 0.5
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def bootstrap_interval(values: ArrayLike, seed: int = 0) -> tuple[float, float]:
    """Between what limits the mean of (n,) values lies for 95 % of samples like ours (percentile bootstrap).

    Says how far questions drawn anew would move the mean, and nothing of a model trained anew. NaN for no values.
    """
    low, high = bootstrap_intervals(np.reshape(np.asarray(values, np.float64), (-1, 1)), seed)
    return float(low[0]), float(high[0])


def bootstrap_intervals(values: Float64, seed: int = 0, n_resamples: int = 2000) -> tuple[Float64, Float64]:
    """`bootstrap_interval` of each column of (n, m) values, from the same samples: two of (m,)."""
    n, m = values.shape
    if not n:
        return np.full(m, nan), np.full(m, nan)
    random = np.random.default_rng(seed)
    at_once = 1 + _RESAMPLED_AT_ONCE // (n * m + 1)
    drawn = (random.integers(0, n, (min(at_once, n_resamples - i), n)) for i in range(0, n_resamples, at_once))
    means = np.concatenate([values[rows].mean(axis=1) for rows in drawn])  # (n_resamples, m)
    low, high = np.quantile(means, [(1 - 0.95) / 2, (1 + 0.95) / 2], axis=0)
    return low, high
