"""Table 6: who finds the passages: BM25, the passages' own encoder (frozen), the trained one, both fused."""

import asyncio
from typing import Annotated

from pydantic import Field

from openbook.core.types import MAX_BM25_WEIGHT, Formulation, RetrieverKind
from openbook.evaluation.settings import EvaluationSettings
from openbook.evaluation.system import opened_library
from openbook.experiments.asking import OPEN_DOMAIN, Asked, OnProgress, Variant, ask, em, found_at
from openbook.experiments.pictures import Axes, Series, drawn
from openbook.experiments.report import Expected, Report, Table
from openbook.models.embedded import EMBEDDED, encoder_folder

DATA = OPEN_DOMAIN
WEIGHT = 0.3
"""Of BM25 in the sum. Its scores are several times the embedded encoder's inner products: see `core.fusion`."""
BM25 = Variant("BM25", Formulation.SEQUENCE, {"retriever": RetrieverKind.BM25})
FROZEN = Variant("dense, frozen", Formulation.SEQUENCE)
LEARNED = Variant("dense, learned", Formulation.SEQUENCE)
HYBRID = Variant("hybrid, by rank", Formulation.SEQUENCE, {"retriever": RetrieverKind.HYBRID})
RANKS = (1, 5, 20, 100)
CURVE = (1, 2, 3, 5, 10, 20, 50, 100)

ABOUT = (
    "The same questions and the same generator, which reads the first passages of five retrievers: BM25 over the "
    "words; the passages' own encoder for questions too (frozen); the query encoder that was trained end to end "
    "(learned); BM25 and the learned one fused, by rank or as a weighted sum. RAG-Sequence marginalises over what "
    "each of them found.",
)
PAPER = (
    ("BM25", "31.8", "44.1", "36.6", "33.8"),
    ("frozen DPR", "41.2", "52.1", "41.8", "52.6"),
    ("learned", "44.0", "55.8", "44.9", "53.4"),
)


class Settings(EvaluationSettings):
    """What the experiment is told."""

    frozen: str = ""  # the encoder that is not trained: of the embedded one its passages' own; else none if not named
    weight: Annotated[float, Field(ge=0, le=MAX_BM25_WEIGHT)] = WEIGHT  # of BM25 in the weighted sum
    n_searched: int = RANKS[-1]


def run(settings: Settings, command: str, on_progress: OnProgress) -> Report:
    """Ask with every retriever. Raises OpenbookError as `ask`; the snapshot needs an index of words."""
    summed = Variant(
        f"dense + {settings.weight:g} BM25",
        Formulation.SEQUENCE,
        {"retriever": RetrieverKind.HYBRID, "bm25_weight": settings.weight},
    )
    variants = [BM25, LEARNED, HYBRID, summed]
    frozen = settings.frozen or (str(encoder_folder()) if settings.encoder.model == EMBEDDED else "")
    by_frozen = settings.model_copy(update={"encoder": settings.encoder.model_copy(update={"model": frozen})})
    if settings.frozen:  # may be misspelt, or of other passages: said before hours of answers with the others
        asyncio.run(_open(by_frozen))
    asked = ask(settings, variants, on_progress)
    expected = []
    if frozen:
        asked = asked.joined(ask(by_frozen, [FROZEN], on_progress))
        variants.insert(1, FROZEN)
        expected.append((LEARNED, FROZEN))
    k = settings.k
    expected += [(HYBRID, LEARNED), (HYBRID, BM25), (summed, LEARNED), (summed, BM25)]
    return Report(
        title="Who finds the passages",
        about=ABOUT,
        command=command,
        made_of=asked.made_of,
        expected=[
            Expected(
                f"{one.name}: an answer in the first {k} no rarer than {other.name}, upper end of the difference",
                asked.difference(one, other, found_at(k)).high,
                0.0,
                1.0,
            )
            for one, other in expected
        ],
        pictures=[("How often one of the first k passages holds an answer, all questions", _curve(asked, variants))],
        tables=[
            Table(
                f"Exact match of RAG-Sequence over the first {k}, per cent",
                ("questions", "n", *(each.name for each in variants)),
                asked.rows(variants, em),
            ),
            *(
                Table(
                    f"An answer in the first {at}, per cent of the questions",
                    ("questions", "n", *(each.name for each in variants)),
                    asked.rows(variants, found_at(at)),
                )
                for at in RANKS
            ),
            Table(
                "The paper's Table 6: exact match of RAG-Sequence on the development sets",
                ("retriever", "Natural Questions", "TriviaQA", "WebQuestions", "CuratedTrec"),
                PAPER,
                about="On FEVER, whose claims share words with their articles, BM25 was best there.",
            ),
        ],
        plan={**asked.lasting_plan, "weight": settings.weight, "frozen": bool(frozen)},
        numbers={
            f"{what}, {file}, {each.name}": asked.mean(each, worth, file).value
            for what, worth in (("exact match", em), (f"answer in the first {k}", found_at(k)))
            for file in asked.files
            for each in variants
        },
    )


async def _open(settings: Settings) -> None:
    async with opened_library(settings):
        pass


def _curve(asked: Asked, variants: list[Variant]) -> str:
    series = [Series(each.name, CURVE, [asked.mean(each, found_at(k)) for k in CURVE]) for each in variants]
    return drawn(Axes("passages, k", "questions, per cent", log_x=True, ticks=CURVE), series)
