"""`openbook evaluate --retrieve`: what is found for every question of some files, written down, then summed up.

The folder `out` holds plan.json (what is asked of what), rankings.jsonl (one `Ranking` a line), and at the end
summary.json, summary.md and for each file of questions <file>.trec, a run that trec_eval reads. Interrupted, it goes on
as `openbook.evaluation.run` does.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from openbook.core.types import RetrievalSettings, Retrieved
from openbook.errors import InvalidRequest
from openbook.evaluation.judged import Judged, read_judged
from openbook.evaluation.rankings import RANKINGS, Ranking, RankingResult, as_markdown, as_trec, summarise
from openbook.evaluation.record import RecordLog, write_json
from openbook.evaluation.run import OnProgress
from openbook.evaluation.settings import N_RANKED, RankingSettings
from openbook.evaluation.summary import as_json
from openbook.evaluation.system import Library, opened_library


@dataclass(frozen=True, slots=True)
class _Batch:
    """Questions of one file that are searched for together."""

    file: str
    judged: Sequence[Judged]
    n_before: int  # of the file
    n_of_file: int


def evaluate_retrieval(
    settings: RankingSettings, on_progress: OnProgress = lambda stage, done, total: None
) -> list[RankingResult]:
    """Search, judge, write everything to `settings.out`; one result for each file.

    Raises:
        InvalidConfig: `out` holds another evaluation.
        InvalidDocuments: as `openbook.evaluation.judged.read_judged`.
        InvalidRequest: a question is too long, or more passages are searched for than the index
            servers allow; names file and question.
        InvalidModel, InvalidSnapshot, ShardUnavailable, SnapshotMismatch: as `openbook.evaluation.system.opened`.
    """
    questions: dict[str, Any] = {}
    batches: list[_Batch] = []
    for path, name in zip(settings.questions, settings.names, strict=True):
        questions[name], judged = read_judged(path, settings)
        batches += _batches(settings.draw(judged), name, settings.batch)
    plan, rankings = asyncio.run(_search(settings, questions, batches, on_progress))
    results = summarise(rankings, plan)
    for name in settings.names:
        run = "".join(as_trec([ranking for ranking in rankings if ranking.file == name]))
        (settings.out / f"{name}.trec").write_text(run, encoding="utf-8")
    write_json(settings.out / "summary.json", {"plan": plan, "results": as_json(results)})
    (settings.out / "summary.md").write_text(as_markdown(plan, results), encoding="utf-8")
    return results


async def _search(
    settings: RankingSettings, questions: dict[str, Any], batches: Sequence[_Batch], on_progress: OnProgress
) -> tuple[dict[str, Any], list[Ranking]]:
    async with opened_library(settings) as library:
        plan = {
            "questions": questions,
            "limit": settings.limit,
            "seed": settings.seed,
            "pages": settings.pages,
            "n_passages": settings.n_passages,
            "retriever": settings.retriever,
            "bm25_weight": settings.bm25_weight,
            "index": library.description,
            "encoder": settings.encoder.model,
            "encoder_fingerprint": library.encoder.fingerprint,
            "dtype": settings.encoder.dtype,
        }
        for batch in batches:
            library.check(batch.file, [each.question for each in batch.judged], settings.retrieval(settings.n_passages))
        with RecordLog.alone(settings.out):
            log = RecordLog(settings.out, plan, Ranking, RANKINGS)
            for batch in batches[log.keep([len(batch.judged) for batch in batches]) :]:
                on_progress(batch.file, batch.n_before, batch.n_of_file)
                log.append(await _rank(library, batch, settings.retrieval(settings.n_passages)))
                on_progress(batch.file, batch.n_before + len(batch.judged), batch.n_of_file)
            return plan, log.read()


async def _rank(library: Library, batch: _Batch, retrieval: RetrievalSettings) -> list[Ranking]:
    questions = [each.question for each in batch.judged]
    try:
        found = await library.find(questions, retrieval)
    except InvalidRequest as error:
        first, last = questions[0].id, questions[-1].id
        raise InvalidRequest(f"{batch.file}, between questions {first} and {last}: {error}") from None
    return [_ranking(batch.file, judged, each) for judged, each in zip(batch.judged, found, strict=True)]


def _ranking(file: str, judged: Judged, found: Retrieved) -> Ranking:
    best: dict[str, float] = {}
    for passage, score in zip(found.passages, found.scores.tolist(), strict=True):
        name = judged.name(passage)
        if name is not None and len(best) < N_RANKED:
            best.setdefault(name, score)
    return Ranking(
        file=file,
        id=judged.question.id,
        question=judged.question.text,
        found=tuple(best),
        scores=tuple(best.values()),
        worth=judged.worth(tuple(best), found.passages),
    )


def _batches(judged: Sequence[Judged], file: str, size: int) -> Iterator[_Batch]:
    for start in range(0, len(judged), size):
        yield _Batch(file, judged[start : start + size], start, len(judged))
