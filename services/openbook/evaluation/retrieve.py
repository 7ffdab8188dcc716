"""`openbook evaluate --retrieve`: what is found for every question of some files, written down, then summed up.

The folder `out` holds plan.json (what is asked of what), rankings.jsonl (one `Ranking` a line), and at the end
summary.json, summary.md and for each file of questions <file>.trec, a run that trec_eval reads. Interrupted, it goes on
as `openbook.evaluation.run` does.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from openbook.core.types import Retrieved
from openbook.evaluation.judged import Judged, read_judged
from openbook.evaluation.rankings import RANKINGS, Ranking, RankingResult, as_markdown, as_trec, summarise
from openbook.evaluation.record import RecordLog, write_json
from openbook.evaluation.run import Batch, OnProgress, batches_of, in_batches
from openbook.evaluation.settings import N_RANKED, RankingSettings
from openbook.evaluation.summary import as_json
from openbook.evaluation.system import opened_library


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
    batches: list[Batch[Judged]] = []
    for path, name in zip(settings.questions, settings.names, strict=True):
        questions[name], judged = read_judged(path, settings)
        batches += batches_of(judged, name, settings.batch)
    plan, rankings = asyncio.run(_search(settings, questions, batches, on_progress))
    results = summarise(rankings, plan)
    for name in settings.names:
        run = "".join(as_trec([ranking for ranking in rankings if ranking.file == name]))
        (settings.out / f"{name}.trec").write_text(run, encoding="utf-8")
    write_json(settings.out / "summary.json", {"plan": plan, "results": as_json(results)})
    (settings.out / "summary.md").write_text(as_markdown(plan, results), encoding="utf-8")
    return results


async def _search(
    settings: RankingSettings, questions: dict[str, Any], batches: Sequence[Batch[Judged]], on_progress: OnProgress
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
        retrieval = settings.retrieval(settings.n_passages)
        for batch in batches:
            library.check(batch.file, [each.question for each in batch.questions], retrieval)

        async def rank(batch: Batch[Judged]) -> list[Ranking]:
            found = await library.find([each.question for each in batch.questions], retrieval)
            return [_ranking(batch.file, *each) for each in zip(batch.questions, found, strict=True)]

        with RecordLog.alone(settings.out):
            log = RecordLog(settings.out, plan, Ranking, RANKINGS)
            return plan, await in_batches(log, batches, 1, rank, on_progress)


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
