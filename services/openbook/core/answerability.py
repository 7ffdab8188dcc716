"""Q-BLEU-1: what a generated question is worth, by how far it could be answered as the right one (section 3.3).

Nema and Khapra 2018, "Towards a Better Metric for Evaluating Question Generation Systems", with the lists of words and
the weights of their script (github.com/PrekshaNema25/Answerability-Metric). Words are split here as for BLEU and
ROUGE-L, where the script calls the Penn Treebank's tokenizer.
"""

from collections.abc import Callable, Sequence

from openbook.core.metrics import bleu_1

WEIGHTS = {"named": 0.6, "asking": 0.2, "relevant": 0.1, "function": 0.1}
"""Of names, question words, other words that carry meaning, function words."""
DELTA = 0.7
"""Of answerability; the rest is BLEU-1's."""

ASKING = frozenset(("what", "which", "why", "who", "whom", "whose", "where", "when", "how"))
WITH_TYPE = frozenset(("what", "which"))
"""After these comes the type of what is asked for, "which team", which is part of the question word."""
_FUNCTION = """
a about above after again against all am an and any are as at be because been before being below between both but by can
did do does doing don down during each few for from further had has have having he her here hers herself him himself his
i if in into is it its itself just me more most my no nor not now of off on once only or other our ours ourselves out
over own s same she should so some such t than that the their theirs them themselves then there these they this those
through to too under until up very was we were while will with you your yours yourself yourselves
"""
FUNCTION = frozenset(_FUNCTION.split())


def q_bleu_1(prediction: str, questions: Sequence[str]) -> float:
    """Of one generated question, 0..1, for the right question where it is highest; its mean is the paper's Q-BLEU-1."""
    return max((_against(prediction, question) for question in questions), default=0.0)


def _against(prediction: str, question: str) -> float:
    said, right = prediction.split(), question.split()
    answerability = sum(weight * _overlap(PARTS[part](said), PARTS[part](right)) for part, weight in WEIGHTS.items())
    return DELTA * answerability + (1 - DELTA) * bleu_1([prediction], [[question]])


def _overlap(said: Sequence[str], right: Sequence[str]) -> float:
    """F1 of both directions' BLEU-1. Where neither has such words it is 0, as in the script."""
    a, b = " ".join(said), " ".join(right)
    precision, recall = bleu_1([a], [[b]]), bleu_1([b], [[a]])
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _named(words: Sequence[str]) -> list[str]:
    rest = words[1:] if words and words[0].lower() in ASKING else words
    return [word for word in rest if word[0].isupper()]


def _asking(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    for i, word in enumerate(words):
        if _asks(word):
            found += words[i : i + 2] if word.lower() in WITH_TYPE else [word]
    return found


def _relevant(words: Sequence[str]) -> list[str]:
    asking = _asking(words)
    return [word for word in words if word not in asking and not word[0].isupper() and word not in FUNCTION]


def _function(words: Sequence[str]) -> list[str]:
    return [word.lower() for word in words if word.lower() in FUNCTION]


def _asks(word: str) -> bool:
    return word in ASKING or (word.istitle() and word.lower() in ASKING)


PARTS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "named": _named,
    "asking": _asking,
    "relevant": _relevant,
    "function": _function,
}
