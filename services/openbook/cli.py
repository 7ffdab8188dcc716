"""One command per job. What a command needs is imported inside it, so that `--help` and the index tier stay light."""

import os
import sys
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from openbook import __version__, files
from openbook.core.address import EXPECTED, is_address
from openbook.core.types import Decoding, Formulation, RetrieverKind
from openbook.deployment.command import deploy_app
from openbook.doctor.command import doctor
from openbook.errors import InvalidConfig, InvalidRequest, OpenbookError
from openbook.experiments.command import experiment_app
from openbook.explain.command import explain
from openbook.keys import keys_app
from openbook.loadtest.command import loadtest, loadtest_merge
from openbook.options import refuse_beside
from openbook.passages import passages_app
from openbook.planning.command import plan
from openbook.reaching import TLS, Ca, Cert, Key, Tls, client

if TYPE_CHECKING:
    from openbook.config import IndexClientSettings
    from openbook.core.splitting import At
    from openbook.corpus.duplicates import What
    from openbook.corpus.encode import Elsewhere
    from openbook.index.building.build import ExactDtype

# Plain help: boxes leave the descriptions a third of 80 columns.
app = typer.Typer(
    name="openbook",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
index_app = typer.Typer(no_args_is_help=True, help="The index tier.")
app.add_typer(index_app, name="index")
app.add_typer(keys_app, name="keys")
app.add_typer(passages_app, name="passages")
app.add_typer(deploy_app, name="deploy")
app.add_typer(experiment_app, name="experiment")
app.command()(doctor)
app.command()(plan)

SERVE = (["up"], ["index"], ["deploy"], ["demo"])
"""Commands whose logs, and those of the processes that they start, have gRPC's own words too."""

Config = Annotated[Path | None, typer.Option(help="YAML settings; OPENBOOK_<SECTION>__<KEY> in the environment wins.")]


def _show_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def every(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it, and exit.")
    ] = False,
) -> None:
    """Answers questions from documents, and names them."""


@app.command()
def build(
    documents: Annotated[
        str,
        typer.Argument(
            help="A file or a folder of any format in docs/build.md; also s3://, gs://, https://; or 'embedded'."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The snapshot's folder; must not exist yet.")],
    shards: Annotated[int, typer.Option(help="Disjoint parts, one index server each.")] = 1,
    factory: Annotated[str, typer.Option(help="FAISS factory string: Flat, HNSW32, 'IVF256,SQ8', ...")] = "Flat",
    encoder: Annotated[str, typer.Option(help="'embedded', a hub name, or a folder.")] = "embedded",
    words: Annotated[int | None, typer.Option(help="Of a passage, at most; 100 if not given.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Of a passage, at most, in place of words.")] = None,
    at: Annotated[str, typer.Option(help="Where passages end: words, sentences, or headings.")] = "words",
    overlap: Annotated[int, typer.Option(help="Words (or tokens) that a passage repeats of the one before.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 where it is faster.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="Cores; if not given OMP_NUM_THREADS, or all.")] = None,
    recall: Annotated[float | None, typer.Option(help="At 10: search as widely as it takes to reach it.")] = None,
    queries: Annotated[Path | None, typer.Option(help="Held-back questions, JSON lines, to measure recall.")] = None,
    query_encoder: Annotated[str | None, typer.Option(help="Of these, if it is another one.")] = None,
    scan: Annotated[str | None, typer.Option(help="'int8': Flat finds single queries faster, as exactly.")] = None,
    exact_dtype: Annotated[
        str, typer.Option(help="Of the vectors that scores are computed from: float32, or float16 in half the disk.")
    ] = "float32",
    vectors: Annotated[
        Path | None, typer.Option(help="Embeddings that exist already: .npy, Parquet, Arrow; a file or a folder.")
    ] = None,
    former: Annotated[
        Path | None, typer.Option("--from", help="A former snapshot: only what is not in it is encoded.")
    ] = None,
    bm25: Annotated[bool, typer.Option(help="Index the words too, for the retrievers bm25 and hybrid.")] = True,
    duplicates: Annotated[
        str, typer.Option(help="Passages that repeat others, also nearly: keep, report, or drop them.")
    ] = "keep",
    report: Annotated[
        Path | None, typer.Option(help="A page of HTML to write: what was made, left out, repeats, takes how long.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End at the first file or record that is bad.")] = False,
    ray: Annotated[str | None, typer.Option(help="Encode on the Ray cluster there; 'auto': on this one.")] = None,
    ray_gpus: Annotated[float, typer.Option(min=0, help="Of a GPU, for each task that encodes there.")] = 0.0,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field", help="NAME:TYPE of documents to keep (string, int, float, bool, date); each its --field."
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The column, or field of records, that is the text.")] = None,
    title: Annotated[str | None, typer.Option(help="The one that is the title.")] = None,
    document_id: Annotated[str | None, typer.Option("--id", help="The one that is the document's id.")] = None,
) -> None:
    """Documents to passages to embeddings to a snapshot. Interrupted, it goes on where it stopped.

    What cannot be read is left out, and listed at the end.
    """
    from openbook.index.building.build import check_new

    beside = files.beside(out, "{}.*")
    if not any(beside.parent.glob(beside.name)):  # else a killed build may have left what this one removes first
        check_new(out)  # before what takes seconds to be imported

    from openbook.config import EncoderSettings, section
    from openbook.core.origin import Field
    from openbook.core.splitting import Splitting
    from openbook.corpus.build import build_corpus, embedded_documents
    from openbook.corpus.duplicates import Repeated
    from openbook.corpus.former import Changes
    from openbook.corpus.remote import fetched
    from openbook.corpus.report import Stages, write_report
    from openbook.corpus.sources.limits import Failure, OnFailure, raise_it
    from openbook.corpus.sources.recognise import Names
    from openbook.files import check_place
    from openbook.index.remote.place import is_url
    from openbook.terminal import build_progress, bytes_progress, counted, print_changes, print_failures, print_repeated

    splitting = Splitting.of(words, tokens, cast("At", at), overlap)
    names = Names.of(text=text, title=title, id=document_id)
    changes: list[Changes] = []
    repeated: list[Repeated] = []
    failures: list[Failure] = []
    if report:
        check_place(report)
        if report.resolve() == out.resolve():
            raise InvalidConfig(f"--report must be another file than the snapshot's folder, got {report} for both")
    on_cores = {"n_threads": threads or 0, "num_gpus": ray_gpus}
    encodes = section(EncoderSettings, "openbook build", model=encoder, dtype=dtype, **on_cores)
    on_ray: AbstractContextManager[Elsewhere | None] = nullcontext()
    if ray_gpus and not ray:
        raise InvalidConfig(f"--ray-gpus is of tasks on a Ray cluster, got {ray_gpus:g} without --ray")
    if ray:
        from openbook.ray_encoding import encoders

        on_ray = encoders(ray, encodes)
    on_failure: OnFailure = raise_it if strict else failures.append
    with on_ray as elsewhere, print_failures(failures), ExitStack() as fetching:
        path = embedded_documents() if documents == "embedded" else Path(documents)
        if is_url(documents):
            with bytes_progress("fetch") as on_bytes:
                path = fetching.enter_context(fetched(documents, out, on_failure, on_bytes))
        stages = Stages(fetching.enter_context(build_progress()))
        manifest = build_corpus(
            path,
            out,
            encodes,
            n_shards=shards,
            factory=factory,
            splitting=splitting,
            recall_target=recall,
            queries=queries,
            query_encoder=query_encoder,
            scan=scan,
            exact_dtype=cast("ExactDtype", exact_dtype),
            vectors=vectors,
            former=former,
            bm25=bm25,
            on_progress=stages,
            on_failure=on_failure,
            fields=tuple(map(Field.parse, fields or ())),
            on_changes=changes.append,
            duplicates=cast("What", duplicates),
            on_duplicates=repeated.append,
            elsewhere=elsewhere,
            names=names,
        )
    for each in changes:
        print_changes(each)
    for found in repeated:
        print_repeated(found)
    if report:
        write_report(report, out, stages, failures, changes[0] if changes else None)
    holds = f"{counted(manifest.n_passages, 'passage')} in {counted(len(manifest.shards), 'shard')}"
    print(f"{out}: snapshot {manifest.snapshot_id}, {holds}")


@index_app.command("serve")
def index_serve(
    snapshot: Annotated[Path | None, typer.Argument(help="A snapshot, or what `openbook index root` made.")] = None,
    shard: Annotated[int | None, typer.Option(help="Which shard of the snapshot.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; loopback if not given.")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one; the address is printed.")] = None,
    threads: Annotated[int | None, typer.Option(help="FAISS threads.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Of metrics over HTTP: the first free one of 32.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML with a section index_server; OPENBOOK_INDEX_SERVER__<KEY> wins over it.")
    ] = None,
) -> None:
    """Serve one shard over gRPC until told to stop."""
    from openbook.config import load_index_server
    from openbook.index.server.server import run
    from openbook.logs import setup_logging
    from openbook.tracing.spans import setup_tracing

    address = {"host": host, "port": port, "metrics_port": metrics_port}
    settings = load_index_server(config, None, snapshot=snapshot, shard=shard, n_threads=threads, **address)
    role = f"index-{settings.shard}"
    setup_logging(role)
    setup_tracing(role)
    run(settings)


@index_app.command("check")
def index_check(
    address: Annotated[str, typer.Argument(help="host:port of an index server.")],
    config: Config = None,
) -> None:
    """Exit with 0 if it answers questions. For health checks of containers."""
    from openbook.index.client.health import check

    check(_index_settings(config, [address], "ADDRESS"), address)


@index_app.command("root")
def index_root(
    folder: Annotated[Path, typer.Argument(help="Where snapshots lie and are published; made if it is not there.")],
    snapshot: Annotated[Path, typer.Argument(help="Which snapshot it serves at first.")],
) -> None:
    """Make a root, which snapshots are published to. Its servers serve from it across restarts."""
    from openbook.index.disk.root import Root

    Root.create(folder, snapshot)
    print(f"{folder}: serves {snapshot}")


@index_app.command("fetch")
def index_fetch(
    url: Annotated[str, typer.Argument(help="Of a snapshot's folder: s3://, gs://, https://, http:// or file://.")],
    folder: Annotated[Path, typer.Argument(help="Where it is to lie.")],
    shard: Annotated[list[int] | None, typer.Option(help="Only this one; give each its --shard.")] = None,
) -> None:
    """Bring a snapshot here from elsewhere, every file compared with its digest. Interrupted, it goes on."""
    from openbook.index.remote.fetch import fetch
    from openbook.terminal import bytes_progress

    with bytes_progress("fetch") as on_bytes:
        manifest = fetch(url, folder, shard, on_bytes=on_bytes)
    print(f"{folder}: snapshot {manifest.snapshot_id}")


@index_app.command("push")
def index_push(
    folder: Annotated[Path, typer.Argument(help="A snapshot, or a root, of which what it serves is copied.")],
    url: Annotated[str, typer.Argument(help="Where its files are to lie: s3://, gs:// or file://.")],
) -> None:
    """Copy a snapshot elsewhere, read back and compared. Interrupted, run it again."""
    from openbook.index.remote.push import push
    from openbook.terminal import bytes_progress

    with bytes_progress("push") as on_bytes:
        snapshot_id = push(folder, url, on_bytes)
    print(f"{url}: snapshot {snapshot_id}")


@index_app.command("bm25")
def index_bm25(snapshot: Annotated[Path, typer.Argument(help="The folder of a snapshot.")]) -> None:
    """Index the words of a snapshot built without them. Servers find it at their next question."""
    from openbook.index.building.build import add_bm25
    from openbook.terminal import build_progress

    with build_progress() as on_progress:
        n_passages = add_bm25(snapshot, on_progress)
    print(f"{snapshot}: words of {n_passages} passages indexed")


Servers = Annotated[list[str] | None, typer.Option("--index", help="host:port of every index server.")]


@app.command()
def publish(
    snapshot: Annotated[
        str, typer.Argument(help="A snapshot's folder, or its URL, from which servers fetch it; the former rolls back.")
    ],
    index: Servers = None,
    at_servers: Annotated[Path | None, typer.Option(help="The folder as the servers see it, if elsewhere.")] = None,
    config: Config = None,
) -> None:
    """Make a snapshot current at all index servers, or at none. Interrupted, run it again.

    The admin token comes from the settings: OPENBOOK_INDEX__ADMIN_TOKEN.
    """
    import asyncio

    from openbook.index.client.publish import publish
    from openbook.index.remote.place import is_url
    from openbook.terminal import build_progress

    settings = _index_settings(config, index)
    with build_progress() as on_progress:
        source = snapshot if is_url(snapshot) else Path(snapshot)
        sequence = asyncio.run(publish(source, settings, at_servers, on_progress))
    print(f"{snapshot}: current at all servers, publication {sequence}")


@app.command()
def snapshots(
    where: Annotated[list[str] | None, typer.Argument(help="Snapshots, a root, or host:port of servers.")] = None,
    config: Config = None,
) -> None:
    """List snapshots in folders or at index servers. With neither given, at the servers in the settings."""
    import asyncio

    from openbook.index.client.publish import held_by_root, held_by_servers
    from openbook.terminal import print_snapshots

    folders = [Path(each) for each in where or () if Path(each).is_dir()]
    addresses = [each for each in where or () if not Path(each).is_dir()]
    if strange := [each for each in addresses if not is_address(each)]:
        raise InvalidRequest(f"{strange[0]}: no such folder, and a server {EXPECTED}")
    rows = []
    for folder in folders:
        rows += (found := held_by_root(folder))
        if not found:
            print(f"{folder}: holds no snapshot", file=sys.stderr)
    if addresses or not folders:
        rows += asyncio.run(held_by_servers(_index_settings(config, addresses)))
    print_snapshots(rows)


def _index_settings(config: Path | None, addresses: list[str] | None, option: str = "--index") -> "IndexClientSettings":
    """Those of the file, with these servers if any are named. Raises InvalidConfig: one of them is no address."""
    from openbook.config import load

    if strange := [each for each in addresses or () if not is_address(each)]:
        raise InvalidConfig(f"{option} {EXPECTED}, got {strange[0]!r}")
    settings = load(config).index
    return settings.at(tuple(addresses)) if addresses else settings


@app.command()
def up(
    snapshot: Annotated[
        Path | None, typer.Argument(help="What `openbook build` or `index root` made; without, the embedded corpus.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    config: Config = None,
) -> None:
    """Start the whole system on this machine. Index servers, cache, Ray Serve; Ctrl-C stops all of it.

    When the file of --config changes, so does the system, without a pause.
    """
    import webbrowser

    from openbook.certificates import Renewed
    from openbook.config import load
    from openbook.logs import setup_logging
    from openbook.serving.launch.local import follow, local_system, state_of, until_stopped

    setup_logging("up")
    seen = state_of(config) if config else None  # first: whoever changes it while we start is heard afterwards
    wanted = load(config)
    # For the log alone: HAProxy is given a renewed certificate by a process of its own, whose words nobody sees.
    look = Renewed("serving.tls", wanted.serving.tls, len).changed if wanted.serving.tls else lambda: False
    if snapshot is None and not wanted.index.names_servers:
        from openbook.demo import FOLDER, embedded_snapshot

        snapshot = embedded_snapshot(FOLDER)
    with until_stopped(), local_system(snapshot, wanted, config) as settings:
        serving = settings.serving
        if where := settings.index.discover or " ".join(f"--index {each}" for each in settings.index.addresses):
            print(f"index servers, to publish to: {where}")
        print(f"ready: {serving.http_url}/ in a browser, gRPC {serving.grpc_address}; Ctrl-C stops", flush=True)
        if open_page:
            webbrowser.open(f"{serving.http_url}/")
        if config:
            follow(config, settings, seen, look)
        while True:  # a signal that came just before would not end one long sleep
            time.sleep(1.0)
            look()


@app.command()
def ask(
    context: typer.Context,
    question: str,
    server: Annotated[str, typer.Option(help="host:port of the gRPC endpoint.")] = "127.0.0.1:9000",
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", "--timeout", help="Seconds within which the answer is worth having.")
    ] = 30.0,
    k: Annotated[int | None, typer.Option(help="Passages to retrieve.")] = None,
    min_coverage: Annotated[
        float | None, typer.Option(help="Answer if this share of the passages can be searched; 1 is all or nothing.")
    ] = None,
    nprobe: Annotated[int | None, typer.Option(help="IVF: cells looked at.")] = None,
    ef_search: Annotated[int | None, typer.Option(help="HNSW: candidates kept.")] = None,
    rerank_factor: Annotated[int | None, typer.Option(help="Candidates per hit scored exactly.")] = None,
    retriever: Annotated[
        RetrieverKind | None, typer.Option(help="Who finds passages: the query, the question's words, or both.")
    ] = None,
    bm25_weight: Annotated[
        float | None, typer.Option(help="Hybrid: dense + so much of BM25's; if not given, ranks decide.")
    ] = None,
    without: Annotated[
        list[int] | None, typer.Option("--without", help="Id of a passage that is no evidence; each its --without.")
    ] = None,
    passages: Annotated[
        list[str] | None, typer.Option("--passage", help="A text of yours, read beside what is found; or k 0, alone.")
    ] = None,
    formulation: Annotated[Formulation | None, typer.Option(help="How passages are marginalised out.")] = None,
    decoding: Annotated[Decoding | None, typer.Option(help="How RAG-Sequence scores its candidates.")] = None,
    n_beams: Annotated[int | None, typer.Option("--n-beams", "--beams", help="1 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Of an answer.")] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="Of an answer.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Above 0 longer answers are preferred.")] = None,
    early_stopping: Annotated[
        bool | None, typer.Option(help="End the search once there are as many answers as beams.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Above 0 the answer is sampled, without beams.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the tokens that hold so much together.")] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--label", help="The answer is one of these; give each its --label.")
    ] = None,
    n_answers: Annotated[int | None, typer.Option(help="At most as many as beams, or so many samples.")] = None,
    follow: Annotated[int | None, typer.Option(help="RAG-Token: look again after so many tokens.")] = None,
    tokens: Annotated[bool | None, typer.Option("--tokens", help="Show each token with its passages.")] = None,
    min_probability: Annotated[float | None, typer.Option(help="Hold back answers less probable.")] = None,
    min_confidence: Annotated[float | None, typer.Option(help="Hold back answers less surely right.")] = None,
    request_id: Annotated[str | None, typer.Option(help="Returned, and written in the logs.")] = None,
    tls: Tls = False,
    tls_ca: Ca = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
) -> None:
    """Ask a running system. Shows the answer with its passages, priors, posteriors and timings.

    Where a key is needed, it is taken from OPENBOOK_API_KEY.
    """
    from openbook.core.types import OwnPassage
    from openbook.terminal import print_answer

    about_us = ("question", "server", "timeout_s", *TLS)
    with client(server, context.params, timeout_s) as endpoint:
        asked = {name: value for name, value in context.params.items() if name not in about_us}
        asked["passages"] = [OwnPassage(text) for text in passages or ()]
        print_answer(question, endpoint.answer(question, **asked))


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(help="What OPENBOOK_TRACE_FILE named.")],
    request_id: Annotated[str | None, typer.Option(help="Of the request; the last one if not given.")] = None,
    out: Annotated[Path, typer.Option(help="The picture, in SVG.")] = Path("trace.svg"),
) -> None:
    """Draw what one request met on its way: a row a span, from all processes."""
    from openbook.tracing.picture import choose, draw, read

    files.check_place(out)
    spans = choose(read(file), request_id)
    files.write(out, draw(spans))
    print(f"{out}: {len(spans)} spans of trace {spans[0].trace_id}")


@app.command()
def demo(folder: Annotated[Path, typer.Option(help="Where the demo's snapshot is kept.")] = Path("var/demo")) -> None:
    """Build, serve and ask an embedded corpus, then stop. Two shards; the second run starts at once."""
    begun = time.monotonic()
    from openbook.demo import run

    run(folder, begun)


@app.command()
def calibrate(
    model: Annotated[Path, typer.Argument(help="The generator's folder; confidence.json goes there.")],
    evaluations: Annotated[list[Path], typer.Argument(help="What `openbook evaluate --out` wrote: to be fitted to.")],
    on: Annotated[list[Path], typer.Option(help="The same of other questions: to be judged by.")],
    picture: Annotated[Path | None, typer.Option(help="Before and after: .png, .svg, .pdf.")] = None,
) -> None:
    """Fit how sure answers are to how often they were right, so that they carry a confidence."""
    from openbook.evaluation.calibrate import calibrate
    from openbook.models.confidence import CONFIDENCE
    from openbook.models.embedded import EMBEDDED, reader_folder
    from openbook.terminal import print_calibration

    if picture:
        from openbook.evaluation.pictures import check_place, draw_calibration

        check_place(picture)
    if str(model) == EMBEDDED:
        raise InvalidConfig(
            f"{model}: is installed with openbook, which the next version replaces: "
            f"`cp -r {reader_folder()} my-model`, calibrate that, and serve it as generator.model"
        )
    replaced = (model / CONFIDENCE).exists()
    judged, without = calibrate(model, evaluations, on)
    print_calibration(judged)
    for why in without:
        print(f"no confidence: {why}")
    print(f"{model / CONFIDENCE}: written{', in place of a former one' if replaced else ''}")
    if picture:
        draw_calibration(judged, picture)


@app.command()
def evaluate(
    context: typer.Context,
    questions: Annotated[
        list[Path], typer.Argument(help="Questions and answers: JSON lines, also .gz; or see --retrieve.")
    ],
    out: Annotated[Path, typer.Option(help="Where everything is written; an interrupted evaluation goes on here.")],
    snapshot: Annotated[Path | None, typer.Option(help="Search this one, served for as long as it takes ...")] = None,
    index: Servers = None,
    gold: Annotated[bool, typer.Option("--gold", help="Read each question's own context, search nothing.")] = False,
    closed_book: Annotated[bool, typer.Option("--closed-book", help="Read nothing, search nothing.")] = False,
    retrieve: Annotated[
        bool,
        typer.Option("--retrieve", help="Only search: questions, BEIR's folders or KILT's files to what is found."),
    ] = False,
    passages: Annotated[int, typer.Option(help="Passages to search with --retrieve.")] = 100,
    split: Annotated[str, typer.Option(help="Of BEIR's qrels.")] = "test",
    retriever: Annotated[RetrieverKind, typer.Option(help="Who finds passages.")] = RetrieverKind.DENSE,
    bm25_weight: Annotated[float | None, typer.Option(help="Hybrid: as for `openbook ask`.")] = None,
    pages: Annotated[str, typer.Option(help="KILT's pages are documents of this 'id', or of this 'title'.")] = "id",
    k: Annotated[int, typer.Option(help="Passages to read.")] = 5,
    formulation: Annotated[list[Formulation] | None, typer.Option(help="Sequence if not given; or both.")] = None,
    decoding: Annotated[Decoding, typer.Option(help="How RAG-Sequence scores its candidates.")] = Decoding.THOROUGH,
    beams: Annotated[int, typer.Option(help="Beams; 1 is greedy.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 32,
    label: Annotated[
        list[str] | None,
        typer.Option(help="The answer is one of these; give each its --label. SUPPORTS=true: by that word."),
    ] = None,
    follow: Annotated[int, typer.Option(help="RAG-Token: look for passages again after so many tokens.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Only so many questions of each file, drawn at random.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds draw equal questions.")] = 0,
    encoder: Annotated[str | None, typer.Option(help="'embedded', a hub name, a folder; else as settings say.")] = None,
    passage_model: Annotated[str, typer.Option(help="The index's passage encoder, if --encoder does not say.")] = "",
    generator: Annotated[str | None, typer.Option(help="As for --encoder.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 where it is faster.")] = "float32",
    threads: Annotated[int | None, typer.Option(help="Of the models; if not given OMP_NUM_THREADS, or all.")] = None,
    config: Config = None,
) -> None:
    """Measure how good answers, or with --retrieve rankings, are. docs/evaluate.md explains every number."""
    from openbook.config import load, section
    from openbook.evaluation.retrieve import evaluate_retrieval
    from openbook.evaluation.run import evaluate
    from openbook.evaluation.settings import EvaluationSettings, RankingSettings
    from openbook.terminal import build_progress, print_summary

    if retrieve + gold + closed_book > 1:
        raise InvalidRequest("--retrieve, --gold and --closed-book exclude each other: only --retrieve searches")
    generates = ("k", "formulation", "decoding", "beams", "max_new_tokens", "label", "follow", "generator")
    for said, is_said, without_use in (
        ("--retrieve", retrieve, generates),
        ("an evaluation without --retrieve", not retrieve, ("passages", "split")),
        ("--gold" if gold else "--closed-book", gold or closed_book, ("retriever", "bm25_weight", "k")),
    ):
        if is_said:
            refuse_beside(said, context, without_use)
    model = {"dtype": dtype, "n_threads": threads or 0}
    served = load(config)
    if encoder is None:  # whose passages it is for is said beside it
        encoder, passage_model = served.encoder.model, passage_model or served.encoder.passage_model
    asked = {
        "questions": questions,
        "out": out,
        "snapshot": snapshot,
        "index": _index_settings(config, index) if index or not (snapshot or gold or closed_book) else {},
        "encoder": {"model": encoder, "passage_model": passage_model, **model},
        "limit": limit,
        "seed": seed,
        "retriever": retriever,
        "bm25_weight": bm25_weight,
        "pages": pages,
    }
    with build_progress() as on_progress:
        if retrieve:
            ranked = {"split": split, "n_passages": passages}
            evaluate_retrieval(section(RankingSettings, "openbook evaluate", **asked, **ranked), on_progress)
        else:
            settings = section(
                EvaluationSettings,
                "openbook evaluate",
                **asked,
                context="gold" if gold else "none" if closed_book else "retrieved",
                generator={"model": generator or served.generator.model, **model},
                k=k,
                formulations=formulation or [Formulation.SEQUENCE],
                decoding=decoding,
                n_beams=beams,
                max_new_tokens=max_new_tokens,
                labels=label or (),
                follow=follow,
            )
            evaluate(settings, on_progress)
    print_summary((out / "summary.md").read_text(encoding="utf-8"))


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML: task, retrieval, models, optimizer, loop, workers.")],
    local: Annotated[bool, typer.Option(help="In this process, without Ray: one worker.")] = False,
    ray: Annotated[str | None, typer.Option(help="Train on the Ray cluster there; 'auto': on this one.")] = None,
) -> None:
    """Fine-tune query encoder and generator end to end. Interrupted, run it again: it goes on where it stopped."""
    from openbook.config import read
    from openbook.terminal import training_progress
    from openbook.training.settings import TrainingSettings

    if local and ray:
        raise InvalidConfig(f"--local trains without Ray, got --ray {ray} too")
    settings = read(TrainingSettings, config)
    with training_progress(settings.loop.n_steps) as on_step:
        if local:
            from openbook.training.run import train

            models = train(settings, on_step)
        else:
            from openbook.training.cluster import fit

            models = fit(settings, on_step, ray)
    print(f"{models}: trained for {settings.loop.n_steps} steps; curves in {settings.loop.out}")


@app.command()
def mcp(
    server: Annotated[str, typer.Option(help="The running endpoint.")] = "http://127.0.0.1:8000",
    tls_ca: Annotated[
        Path | None, typer.Option(help="Who signs its certificate, PEM; else this machine knows.")
    ] = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
) -> None:
    """Speak MCP over standard input and output, for clients that start their servers themselves.

    Where a key is needed, it is taken from OPENBOOK_API_KEY.
    """
    from openbook.mcp_stdio import run

    run(server, os.environ.get("OPENBOOK_API_KEY"), tls_ca, tls_cert, tls_key)


app.command()(explain)
app.command()(loadtest)
app.command()(loadtest_merge)


def main() -> None:
    """Entry point: our own errors are one line on standard error and exit code 1, or 2 for the caller's fault."""
    # Read when torch and FAISS are imported. Threads that spin while they wait take the cores from those that work:
    # encoding on two busy cores got twice as slow.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.argv[1:2] not in SERVE:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the error says why; gRPC says so too, in lines of its own
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # passages have letters that the terminal's encoding may not have
    try:
        try:
            app()
        except SystemExit:  # as commands end
            with suppress(BrokenPipeError):
                print(end="", flush=True)  # here, and not at the interpreter's end: a full disk is told as one
            raise
    except OpenbookError as error:
        from openbook.console import without_controls

        print(without_controls(f"openbook: {error}"), file=sys.stderr)  # perhaps an endpoint's words
        sys.exit(2 if isinstance(error, InvalidRequest) else 1)
    except OSError as error:  # a file that a command was told to write or read
        if error.filename is None and (why := files.why_full(error)):  # found while writing
            print(f"openbook: {why}", file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter writes at its end what could not be written
            sys.exit(1)
        if error.filename is None or isinstance(error, ConnectionError):
            raise
        why = "is a file, and a folder is needed" if isinstance(error, FileExistsError) else error.strerror
        print(f"openbook: {error.filename}: {why}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("openbook"):
            raise
        print(
            f"openbook: {error.name} is not installed: pip install 'openbook[demo,train,loadtest,mcp]'", file=sys.stderr
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
