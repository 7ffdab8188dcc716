"""`openbook build`: documents to passages to embeddings to a snapshot, able to go on where it was interrupted.

Work in progress lies beside the target in `<out>.work`: the passages, as they were read and by shards, the index of
their words, one memory-mapped array of all embeddings, which of them are to be encoded and in which order, and a note
of those that are. It is continued only for the very same plan, and removed when the snapshot stands. Another plan takes
the embeddings of passages that it has too, if the same encoder makes them.
"""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import get_args

import numpy as np

from openbook import files
from openbook.config import EncoderSettings
from openbook.core.origin import Field, check_fields
from openbook.core.passages import DEFAULT
from openbook.core.space import Space, check_same_space
from openbook.core.splitting import CountTokens, Splitting, not_given
from openbook.core.types import Float32, Passage
from openbook.corpus import vectors as given
from openbook.corpus.duplicates import Duplicates, Repeated, What, without
from openbook.corpus.encode import (
    GPU_ROWS_PER_STEP,
    ROWS,
    VECTORS,
    Elsewhere,
    Meanwhile,
    alone,
    encode,
    encode_elsewhere,
    on_gpu,
    plan_rows,
)
from openbook.corpus.former import Changes, Former, take_left
from openbook.corpus.measures import sentence_finder
from openbook.corpus.questions import read_questions
from openbook.corpus.read import read_passages
from openbook.corpus.sources.limits import Failure, OnFailure, raise_it
from openbook.corpus.sources.recognise import NAMES, Names
from openbook.corpus.sources.walk import corpus_digest
from openbook.corpus.work import (
    DUPLICATES,
    FAILURES,
    LEFT,
    NOTE,
    SHARDS,
    Note,
    Plan,
    folder_of,
    left,
    remove_if_done,
    removed_if_useless,
    resumed,
    set_aside,
    told_if_full,
)
from openbook.errors import InvalidConfig, InvalidDocuments, InvalidRequest, StartupError
from openbook.index.building.build import (
    ExactDtype,
    OnProgress,
    build_snapshot,
    check_new,
    check_plan,
    clear,
    has_texts,
    undisturbed,
    write_texts,
)
from openbook.index.building.words import write_bm25
from openbook.index.disk.arrays import Exact, new_array
from openbook.index.disk.bm25 import has_bm25
from openbook.index.disk.snapshot import Manifest
from openbook.index.disk.store import PassageReader, write_passages
from openbook.models.encoder import TextEncoder
from openbook.processes import threads

ROWS_PER_STEP = 512
"""Passages between two notes of progress, where there are many and no GPU."""
N_STEPS, FEW_ROWS = 16, 32
"""Where there are few, they are at least so many steps of at least so many passages, for all processes to share."""

log = logging.getLogger(__name__)

READ_BETWEEN = 1000
"""Passages read between two calls that say so."""


def build_corpus(
    documents: Path,
    out: Path,
    encoder: EncoderSettings,
    n_shards: int,
    factory: str,
    splitting: Splitting = DEFAULT,
    recall_target: float | None = None,
    queries: Path | None = None,
    query_encoder: str | None = None,
    scan: str | None = None,
    exact_dtype: ExactDtype = "float32",
    vectors: Path | None = None,
    former: Path | None = None,
    bm25: bool = True,
    on_progress: OnProgress = lambda stage, done, total: None,
    on_failure: OnFailure = raise_it,
    fields: tuple[Field, ...] = (),
    on_changes: Callable[[Changes], None] = lambda changes: None,
    duplicates: What = "keep",
    on_duplicates: Callable[[Repeated], None] = lambda repeated: None,
    elsewhere: Elsewhere | None = None,
    names: Names = NAMES,
) -> Manifest:
    """Build a snapshot of a file or a folder; `recall_target`, `scan`, `exact_dtype`, `bm25`: `index.building.build`.

    What cannot be read is left out and told to `on_failure`, also where a build goes on that left it out before;
    if nobody is there to be told, the first ends the build.

    On a CPU as many processes encode as `encoder.n_threads` says, each with one thread and a model of its own. However
    many they are, the snapshot is the same, to the byte, on one machine.

    Passages are `splitting`'s; their tokens are those of `encoder`'s tokenizer.

    Every passage knows where it comes from, and what its document has of the `fields` that are declared. `names` is
    what tables and records call text, title and id.

    With `vectors`, a file or a folder of files, nothing is encoded but a sample, to compare: row i is passage i's. With
    `former`, a snapshot, only those passages are encoded that it has not; what has changed since is told to
    `on_changes`. The snapshot is the same as without it.

    Unless `duplicates` are kept, passages that repeat others are told to `on_duplicates`, and left out if dropped.

    Recall is measured with the questions of the file `queries`, if there is one, as `query_encoder` encodes them; that
    is `encoder` itself if none is named.

    Raises:
        InvalidConfig: `out` exists or is being built, a number is out of its range, or a library is missing.
        InvalidDocuments: the corpus, the file of questions or the vectors cannot be read, or hold no words, no
            questions or vectors of something else.
        InvalidSnapshot: `former` is none, or damaged.
        InvalidModel: an encoder cannot be loaded, or is another one elsewhere.
        InvalidRequest: a question is longer than its encoder can read; names file and question.
        StartupError: a process that encodes ended early, or the disk is full.
        SnapshotMismatch: the query encoder asks for passages that another encoder than this one embedded.
    """
    if splitting.at == "sentences":
        sentence_finder()  # before a model is loaded
    check_fields(fields)
    if not (documents.is_file() or documents.is_dir()):
        raise InvalidDocuments(f"{documents}: no such file")
    if vectors and former:
        raise InvalidConfig("vectors come from files or from a former snapshot, got both")
    if duplicates not in get_args(What):
        raise InvalidConfig(f"duplicates must be {', '.join(get_args(What))}, got {duplicates!r}")
    if vectors and duplicates == "drop":
        raise InvalidConfig("duplicates cannot be dropped where vectors are given: row i is passage i's")
    if documents.is_dir() and out.resolve().is_relative_to(documents.resolve()):
        raise InvalidConfig(f"{out} lies in {documents}, which is read: put it elsewhere")
    model = TextEncoder.load(alone(encoder), role="passage")
    asks = alone(encoder).model_copy(update={"model": query_encoder or encoder.model})
    asked = _encoded(queries, asks, model) if queries else None
    work = folder_of(out)
    remove_if_done(out)
    check_plan(out, n_shards, factory, model.dimension, scan, exact_dtype, recall_target)
    embedded_by = elsewhere.embeds_passages_by(model.space) if elsewhere else model.embeds_passages_by
    known = Former(former, embedded_by, exact_dtype) if former else None
    plan = Plan(
        documents_digest=corpus_digest(documents),
        splitting=splitting,
        fields=fields,
        embedded_by=embedded_by,
        dimension=model.dimension,
        vectors=given.described(vectors) if vectors else None,
        former=known.snapshot_id if known else None,
        duplicates=duplicates,
        names=names,
    )
    at_once = GPU_ROWS_PER_STEP if (elsewhere.on_gpu if elsewhere else on_gpu(encoder)) else ROWS_PER_STEP
    with told_if_full(work), undisturbed(work), removed_if_useless(work):
        check_new(out)  # another build may have been done meanwhile
        if note := resumed(work, plan, exact_dtype):
            for line in (work / FAILURES).read_text().splitlines():
                on_failure(Failure(**json.loads(line)))
        else:
            counts: CountTokens = not_given
            if splitting.unit == "tokens":
                counts = model.count_tokens
            set_aside(work, plan, exact_dtype)
            _start(work, plan, documents, on_failure, threads(encoder.n_threads), counts, on_progress)
            if vectors:
                note = _with_vectors(work, plan, vectors, model)
            else:
                note = _with_rows(work, plan, known, exact_dtype, at_once)
        if note.changes:
            on_changes(note.changes)
        if duplicates != "keep":
            on_duplicates(Repeated.model_validate_json((work / DUPLICATES).read_text(encoding="utf-8")))
        passages = PassageReader(work, fields=fields)

        texts = work / SHARDS / str(n_shards)  # one removed in part is never taken for that of another number

        def write_the_rest(check: Callable[[], None]) -> None:
            def told(stage: str, done: int, total: int) -> None:
                on_progress(stage, done, total)
                check()

            if bm25 and not has_bm25(work):
                write_bm25(work, PassageReader(work), "", lambda done: told("words", done, len(passages)))
            if not has_texts(texts, n_shards):
                shutil.rmtree(texts, ignore_errors=True)
                with files.new_folder(texts) as partial:
                    write_texts(partial, passages, n_shards, fields, told)

        manifest = build_snapshot(
            passages,
            _encoded_all(work, note, at_once, encoder, model, elsewhere, write_the_rest, on_progress),
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
            exact_dtype=exact_dtype,
            embedded_by=None if vectors else embedded_by,
            words=work if bm25 else None,
            texts=texts,
        )
        shutil.rmtree(work, ignore_errors=True)  # NFS keeps a name for files that are open: the next one removes it
    return manifest


def _encoded(queries: Path, settings: EncoderSettings, passages: TextEncoder) -> Float32:
    """(n, d): the questions of a file, as those are encoded that will be asked."""
    encoder = TextEncoder.load(settings)
    asks_for = Space(f"query encoder {settings.model!r}", encoder.space, encoder.dimension)
    check_same_space(asks_for, Space("this corpus", passages.space, passages.dimension))
    questions = list(read_questions(queries, needs_answers=False))
    if not questions:
        raise InvalidDocuments(f"{queries}: holds no questions")
    for question in questions:
        try:
            encoder.padded_length(question.text)
        except InvalidRequest as error:
            raise InvalidRequest(f"{queries}, question {question.id}: {error}") from None
    return encoder.encode_questions([question.text for question in questions])


def embedded_documents() -> Path:
    """The corpus shipped with openbook: about 9,300 passages of Wikipedia."""
    return Path(str(resources.files("openbook") / "embedded/corpus/documents.jsonl.gz"))


def _start(
    work: Path,
    plan: Plan,
    documents: Path,
    on_failure: OnFailure,
    n_processes: int,
    count_tokens: CountTokens,
    on_progress: OnProgress,
) -> None:
    """Write the passages, and what could not be read."""
    (work / NOTE).unlink(missing_ok=True)  # first: it would speak of files that are gone
    clear(work, but=LEFT)
    n_failures = 0
    with (work / FAILURES).open("w") as kept:

        def tell(failure: Failure) -> None:
            nonlocal n_failures
            n_failures += failure.n
            kept.write(json.dumps(asdict(failure)) + "\n")
            on_failure(failure)

        passages = read_passages(
            documents,
            plan.splitting,
            tell,
            n_processes=n_processes,
            fields=plan.fields,
            count_tokens=count_tokens,
            names=plan.names,
        )
        if plan.duplicates != "keep":
            looked = Duplicates()
            marked = looked.marked(passages)
            passages = without(marked) if plan.duplicates == "drop" else (passage for passage, _ in marked)
        missing = {field.name for field in plan.fields}
        told = _told(_without_those_of(passages, missing), on_progress)
        n_passages = write_passages(work, told, fields=plan.fields)
        if plan.duplicates != "keep":
            (work / DUPLICATES).write_text(looked.found.model_dump_json(), encoding="utf-8")
    for name in sorted(missing) if n_passages else ():
        log.warning("no document has a field %s: is it spelled as in the documents?", name)
    if not n_passages:
        left_out = f" that could be read; failures: {n_failures}" if n_failures else ""
        raise InvalidDocuments(f"{documents}: holds no words{left_out}")


def _told(passages: Iterable[Passage], on_progress: OnProgress) -> Iterator[Passage]:
    """The passages; how many they are is told as they come."""
    n = 0
    on_progress("read", 0, 0)
    for n, passage in enumerate(passages, 1):
        if n % READ_BETWEEN == 0:
            on_progress("read", n, 0)
        yield passage
    on_progress("read", n, n)


def _without_those_of(passages: Iterable[Passage], missing: set[str]) -> Iterator[Passage]:
    """The passages; what they have of the fields goes from those that are missing."""
    for passage in passages:
        if missing and passage.origin:
            missing.difference_update(passage.origin.fields)
        yield passage


def _with_vectors(work: Path, plan: Plan, path: Path, model: TextEncoder) -> Note:
    """What there is to do where all vectors are given: nothing."""
    found = given.gathered(path, plan.dimension, work / VECTORS)
    given.check_sample(np.load(found, mmap_mode="r"), PassageReader(work), model, str(path))
    np.save(work / ROWS, np.empty(0, np.int64))
    return _noted(work, Note(plan=plan, vectors=VECTORS if found.parent == work else str(found.absolute())))


def _with_rows(work: Path, plan: Plan, former: Former | None, exact_dtype: str, at_once: int) -> Note:
    """What there is to encode: all that neither the former snapshot has, nor an interrupted build of another plan."""
    passages = PassageReader(work)
    shape = len(passages), plan.dimension
    try:
        vectors = new_array(work / VECTORS, np.float32, shape)
    except StartupError:
        if not (work / LEFT).exists():
            raise
        shutil.rmtree(work / LEFT)  # there is room for one of them
        vectors = new_array(work / VECTORS, np.float32, shape)
    note, is_kept = Note(plan=plan), np.zeros(len(passages), np.bool_)
    if former:
        is_kept, note.changes = former.take(passages, vectors)
        note.rounded_to = former.exact_dtype
    if found := left(work, plan, exact_dtype):
        other, is_there = found
        take_left(work / LEFT, is_there, passages, vectors, is_kept)
        note.rounded_to = note.rounded_to or other.rounded_to
    vectors.flush()
    plan_rows(work, is_kept, at_once)
    _noted(work, note)
    shutil.rmtree(work / LEFT, ignore_errors=True)
    return note


def _noted(work: Path, note: Note) -> Note:
    files.sync(work)  # before a note speaks of it
    note.write(work)
    return note


def _encoded_all(
    work: Path,
    note: Note,
    at_once: int,
    encoder: EncoderSettings,
    model: TextEncoder,
    elsewhere: Elsewhere | None,
    meanwhile: Meanwhile,
    on_progress: OnProgress,
) -> Exact:
    """All vectors, once those are encoded that were not; while other processes here do that, or before others do it
    elsewhere, what is to be done `meanwhile`.
    """
    n_rows = len(np.load(work / ROWS, mmap_mode="r"))

    def on_written(step: range) -> None:
        note.add(step)
        note.write(work)
        on_progress("encode", note.n_done, n_rows)

    on_progress("encode", note.n_done, n_rows)
    n_left = n_rows - note.n_done
    steps = note.steps_left(n_rows, min(at_once, max(FEW_ROWS, n_left // N_STEPS)))
    if elsewhere:
        meanwhile(lambda: None)
        encode_elsewhere(work, steps, elsewhere, on_written)
    else:
        encode(work, steps, encoder, model, on_written, meanwhile)
    vectors: Exact = np.load(work / note.vectors, mmap_mode="r")
    return vectors
