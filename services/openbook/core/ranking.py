"""What a ranking of documents is worth, where it is known which of them are relevant.

The numbers are those of trec_eval, and for provenance those of KILT (Petroni et al. 2021, section 4). A ranking is the
names of different documents, best first. Judgments say how relevant a document is: from 1 on it is relevant, and what
nobody judged is not. Where nothing is relevant, every number is 0, as trec_eval has it.

Who counts ranks raises InvalidRequest where k is less than 1, or a document stands in the ranking twice.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from openbook.core.types import Float64
from openbook.errors import InvalidRequest

Judgments = Mapping[str, int]
"""Document to relevance."""
Pages = Collection[str]
"""A provenance set: pages that support an answer together."""


def success(ranking: Sequence[str], judgments: Judgments, k: int) -> float:
    """1 where one of the first k is relevant, else 0."""
    return float(_relevant(ranking, judgments, k).any())


def precision(ranking: Sequence[str], judgments: Judgments, k: int) -> float:
    """Share of relevant ones among the first k. Places that the ranking does not fill count as wrong ones."""
    return float(_relevant(ranking, judgments, k).sum() / k)


def recall(ranking: Sequence[str], judgments: Judgments, k: int) -> float:
    """Share of the relevant ones that is among the first k."""
    return _share(_relevant(ranking, judgments, k).sum(), _n_relevant(judgments))


def r_precision(ranking: Sequence[str], judgments: Judgments) -> float:
    """Precision at R, the number of relevant documents."""
    n_relevant = _n_relevant(judgments)
    return precision(ranking, judgments, n_relevant) if n_relevant else 0.0


def reciprocal_rank(ranking: Sequence[str], judgments: Judgments, k: int) -> float:
    """1 / rank of the first relevant one, 0 where it is not among the first k. Its mean is MRR@k."""
    places = np.flatnonzero(_relevant(ranking, judgments, k))
    return 1.0 / (int(places[0]) + 1) if len(places) else 0.0


def average_precision(ranking: Sequence[str], judgments: Judgments, k: int) -> float:
    """Mean over all relevant ones of the precision at their ranks, 0 for those beyond k. Its mean is MAP@k."""
    relevant = _relevant(ranking, judgments, k)
    precisions = np.cumsum(relevant) / np.arange(1, len(relevant) + 1)
    return _share(precisions[relevant].sum(), _n_relevant(judgments))


def ndcg(ranking: Sequence[str], judgments: Judgments, k: int) -> float:
    """Relevance, discounted by log2(rank + 1), of the first k, divided by that of the best ranking there could be."""
    ideal = sorted((gain for gain in judgments.values() if gain > 0), reverse=True)[:k]
    return _share(_discounted(_gains(ranking, judgments, k)), _discounted(np.array(ideal, np.float64)))


def kilt_r_precision(ranking: Sequence[str], provenance: Iterable[Pages]) -> float:
    """R-precision against each provenance set, R being its size; the best of them counts."""
    return max((r_precision(ranking, dict.fromkeys(pages, 1)) for pages in provenance), default=0.0)


def kilt_recall(ranking: Sequence[str], provenance: Iterable[Pages], k: int) -> float:
    """Share of the different provenance sets that are whole among the first k places.

    A set takes one place: that of the last of its pages found. A page of no set takes one too, a page of several sets
    one for each whose last it is. So pages beyond k matter: give the whole ranking.
    """
    _check(ranking, k)
    sets = [pages for pages in dict.fromkeys(map(frozenset, provenance)) if pages]
    place = {page: rank for rank, page in enumerate(ranking)}
    found = [[place[page] for page in pages if page in place] for pages in sets]
    misses = set(place.values()).difference(*found)
    places = [(rank, -1, False) for rank in misses]
    places += [(max(at), i, len(at) == len(sets[i])) for i, at in enumerate(found) if at]
    return _share(sum(whole for _, _, whole in sorted(places)[:k]), len(sets))


def kilt_scores(values: ArrayLike, r_precisions: ArrayLike) -> Float64:
    """(n,) what answers are worth, counted only where R-precision is 1: right, and for the right reason.

    Their mean is KILT-EM, KILT-F1, ... Raises InvalidRequest unless both are (n,).
    """
    worth, found = np.asarray(values, np.float64), np.asarray(r_precisions, np.float64)
    if worth.ndim != 1 or worth.shape != found.shape:
        raise InvalidRequest(
            f"values and R-precisions must be (n,) numbers, got shapes {worth.shape} and {found.shape}"
        )
    return np.where(found == 1.0, worth, 0.0)


def _relevant(ranking: Sequence[str], judgments: Judgments, k: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return _gains(ranking, judgments, k) > 0


def _gains(ranking: Sequence[str], judgments: Judgments, k: int) -> Float64:
    """(at most k,) relevance, 0 where there is none."""
    _check(ranking, k)
    return np.array([max(0, judgments.get(document, 0)) for document in ranking[:k]], np.float64)


def _check(ranking: Sequence[str], k: int) -> None:
    if k < 1:
        raise InvalidRequest(f"k must be at least 1, got {k}")
    if len(set(ranking)) < len(ranking):
        twice = next(name for i, name in enumerate(ranking) if name in ranking[:i])
        raise InvalidRequest(f"a ranking must name different documents, got {twice!r} twice")


def _n_relevant(judgments: Judgments) -> int:
    return sum(relevance > 0 for relevance in judgments.values())


def _discounted(gains: Float64) -> float:
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
