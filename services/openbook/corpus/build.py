"""`openbook build`: documents to passages to embeddings to a snapshot, able to go on where it was interrupted.

Work in progress lies beside the target in `<out>.work`: the passages, one memory-mapped array of all embeddings, and a
note of how many rows are done. It is continued only for the very same plan, and removed when the snapshot stands.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ValidationError

from openbook import files
from openbook.config import EncoderSettings
from openbook.core.origin import Field, check_fields
from openbook.core.passages import WORDS_PER_PASSAGE
from openbook.core.space import Space, check_same_space
from openbook.core.types import Float32
from openbook.corpus.encode import VECTORS, alone, encode
from openbook.corpus.questions import read_questions
from openbook.corpus.read import read_passages
from openbook.corpus.sources.limits import Failure, OnFailure, raise_it
from openbook.corpus.sources.walk import corpus_digest
from openbook.errors import InvalidConfig, InvalidDocuments
from openbook.index.building.build import LOCK, build_snapshot, check_plan, clear, undisturbed
from openbook.index.disk.origins import is_of_origins
from openbook.index.disk.snapshot import MANIFEST, Manifest
from openbook.index.disk.store import OFFSETS, TEXTS, PassageReader, write_passages
from openbook.models.encoder import TextEncoder
from openbook.processes import threads

ROWS_PER_STEP = 512
"""Passages between two notes of progress, and the least for which another process is started, which takes seconds."""

NOTE = "note.json"
FAILURES = "failures.jsonl"
OURS = (TEXTS, OFFSETS, VECTORS, NOTE, files.partial_of(Path(NOTE)).name, FAILURES, LOCK)
"""All that lies in a folder of work in progress, which is removed when it is done or out of date."""

OnProgress = Callable[[str, int, int], None]
"""Called with the stage's name, how much is done and how much there is."""


class _Plan(BaseModel, frozen=True):
    """What work in progress is made from; nothing else may go on with it."""

    documents_digest: str
    n_words: int
    fields: tuple[Field, ...]
    encoder_fingerprint: str
    dimension: int
    rows_per_step: int  # the last bits of an embedding depend on what it is encoded with


class _Note(BaseModel):
    plan: _Plan
    n_encoded: int = 0


def build_corpus(
    documents: Path,
    out: Path,
    encoder: EncoderSettings,
    n_shards: int,
    factory: str,
    n_words: int = WORDS_PER_PASSAGE,
    recall_target: float | None = None,
    queries: Path | None = None,
    query_encoder: str | None = None,
    scan: str | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
    on_failure: OnFailure = raise_it,
    fields: tuple[Field, ...] = (),
) -> Manifest:
    """Build a snapshot of a file or a folder; `recall_target` and `scan` as for `openbook.index.building.build`.

    What cannot be read is left out and told to `on_failure`, also where a build goes on that left it out before;
    if nobody is there to be told, the first ends the build.

    On a CPU as many processes encode as `encoder.n_threads` says, each with one thread and a model of its own. However
    many they are, the snapshot is the same, to the byte, on one machine.

    Every passage knows where it comes from, and what its document has of the `fields` that are declared.

    Recall is measured with the questions of the file `queries`, if there is one, as `query_encoder` encodes them; that
    is `encoder` itself if none is named.

    Raises:
        InvalidConfig: `out` exists or is being built, or a number is out of its range.
        InvalidDocuments: the corpus or the file of questions cannot be read, or holds no words or no questions.
        InvalidModel: an encoder cannot be loaded.
        InvalidRequest: a question is longer than its encoder can read.
        StartupError: a process that encodes ended early.
        SnapshotMismatch: the query encoder asks for passages that another encoder than this one embedded.
    """
    if n_words < 1:
        raise InvalidConfig(f"words per passage must be at least 1, got {n_words}")
    check_fields(fields)
    if not (documents.is_file() or documents.is_dir()):
        raise InvalidDocuments(f"{documents}: no such file")
    if documents.is_dir() and out.resolve().is_relative_to(documents.resolve()):
        raise InvalidConfig(f"{out} lies in {documents}, which is read: put it elsewhere")
    model = TextEncoder.load(alone(encoder), role="passage")
    asks = alone(encoder).model_copy(update={"model": query_encoder or encoder.model})
    asked = _encoded(queries, asks, model) if queries else None
    work = out.with_name(f"{out.name}.work")
    _check_ours(work)
    if (out / MANIFEST).exists():  # a build was killed when it was as good as done
        shutil.rmtree(work, ignore_errors=True)
    check_plan(out, n_shards, factory, model.dimension, scan)
    plan = _Plan(
        documents_digest=corpus_digest(documents),
        n_words=n_words,
        fields=fields,
        encoder_fingerprint=model.fingerprint,
        dimension=model.dimension,
        rows_per_step=ROWS_PER_STEP,
    )
    with undisturbed(work):
        if note := _resume(work, plan):
            for line in (work / FAILURES).read_text().splitlines():
                on_failure(Failure(**json.loads(line)))
        else:
            note = _start(work, plan, documents, on_failure, threads(encoder.n_threads))
        passages = PassageReader(work, fields=fields)
        vectors = _encode(work, note, encoder, model, on_progress)
        manifest = build_snapshot(
            passages,
            vectors,
            out,
            n_shards=n_shards,
            factory=factory,
            encoder=encoder.model,
            encoder_fingerprint=model.space,
            on_progress=on_progress,
            queries=asked,
            recall_target=recall_target,
            scan=scan,
            fields=fields,
        )
        shutil.rmtree(work)
    return manifest


def _encoded(queries: Path, settings: EncoderSettings, passages: TextEncoder) -> Float32:
    """(n, d): the questions of a file, as those are encoded that will be asked."""
    encoder = TextEncoder.load(settings)
    asks_for = Space(f"query encoder {settings.model!r}", encoder.space, encoder.dimension)
    check_same_space(asks_for, Space("this corpus", passages.space, passages.dimension))
    texts = [question.text for question in read_questions(queries)]
    if not texts:
        raise InvalidDocuments(f"{queries}: holds no questions")
    return encoder.encode_questions(texts)


def embedded_documents() -> Path:
    """The corpus shipped with openbook: about 9,300 passages of Wikipedia."""
    return Path(str(resources.files("openbook") / "embedded/corpus/documents.jsonl.gz"))


def _check_ours(work: Path) -> None:
    names = {path.name for path in work.glob("*")} - set(OURS)
    if strangers := sorted(name for name in names if not is_of_origins(name)):
        raise InvalidConfig(f"{work} is for work in progress, and holds something else: {', '.join(strangers[:3])}")


def _resume(work: Path, plan: _Plan) -> _Note | None:
    try:
        note = _Note.model_validate_json((work / NOTE).read_text())
    except (OSError, ValidationError):
        return None
    return note if note.plan == plan and (work / VECTORS).exists() and (work / FAILURES).exists() else None


def _start(work: Path, plan: _Plan, documents: Path, on_failure: OnFailure, n_processes: int) -> _Note:
    (work / NOTE).unlink(missing_ok=True)  # first: it would speak of files that are gone
    clear(work)
    n_failures = 0
    with (work / FAILURES).open("w") as kept:

        def tell(failure: Failure) -> None:
            nonlocal n_failures
            n_failures += 1
            kept.write(json.dumps(asdict(failure)) + "\n")
            on_failure(failure)

        passages = read_passages(documents, plan.n_words, tell, n_processes=n_processes, fields=plan.fields)
        n_passages = write_passages(work, passages, fields=plan.fields)
    if not n_passages:
        left_out = f" that could be read; failures: {n_failures}" if n_failures else ""
        raise InvalidDocuments(f"{documents}: holds no words{left_out}")
    np.lib.format.open_memmap(work / VECTORS, "w+", np.float32, (n_passages, plan.dimension)).flush()
    files.sync(work)  # before a note speaks of it
    note = _Note(plan=plan)
    _write(work, note)
    return note


def _encode(work: Path, note: _Note, encoder: EncoderSettings, model: TextEncoder, on_progress: OnProgress) -> Float32:
    vectors: Float32 = np.lib.format.open_memmap(work / VECTORS, "r+")
    steps = {
        start: range(start, min(start + ROWS_PER_STEP, len(vectors)))
        for start in range(note.n_encoded, len(vectors), ROWS_PER_STEP)
    }

    def on_written(rows: range) -> None:
        written.add(rows.start)
        while note.n_encoded in written:  # noted is what has no gap before it
            note.n_encoded = steps[note.n_encoded].stop
        _write(work, note)
        on_progress("encode", note.n_encoded, len(vectors))

    written: set[int] = set()
    on_progress("encode", note.n_encoded, len(vectors))
    encode(work, list(steps.values()), encoder, model, on_written)
    return vectors


def _write(work: Path, note: _Note) -> None:
    files.write(work / NOTE, note.model_dump_json())
