"""The commands `openbook experiment NAME`: one function each."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from importlib import import_module
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openbook import files
from openbook.core.types import Decoding, Formulation
from openbook.errors import InvalidConfig
from openbook.processes import processor

if TYPE_CHECKING:
    from openbook.experiments.report import Report

experiment_app = typer.Typer(
    no_args_is_help=True, help="The paper's experiments, each a page. See docs/experiments.md."
)

Questions = Annotated[
    list[Path] | None, typer.Argument(help="JSON lines, also .gz; see docs/evaluate.md. If none, those that ship.")
]
Out = Annotated[Path | None, typer.Option(help="The page, in HTML; NAME.html if not given.")]
Check = Annotated[bool, typer.Option("--check", help="End with 1 where a number is not as expected.")]
Against = Annotated[Path | None, typer.Option(help="A former page of the same command, whose numbers are expected.")]
SnapshotOption = Annotated[Path | None, typer.Option("--snapshot", help="Searched; else the embedded corpus.")]
Index = Annotated[list[str] | None, typer.Option(help="host:port of an index server that runs; give each its --index.")]
Limit = Annotated[int | None, typer.Option(help="Only so many questions of a file, drawn at random.")]
Seed = Annotated[int, typer.Option(help="Equal seeds draw equal questions.")]
Encoder = Annotated[str, typer.Option(help="'embedded', a hub name, or a folder.")]
PassageModel = Annotated[str, typer.Option(help="The index's passage encoder, if --encoder does not say.")]
Generator = Annotated[str, typer.Option(help="'embedded', a hub name, or a folder.")]
K = Annotated[int, typer.Option(help="Passages to read.")]
Beams = Annotated[int, typer.Option(help="Beams; 1 is greedy.")]
Scoring = Annotated[Decoding, typer.Option(help="How RAG-Sequence scores its candidates.")]
MaxNewTokens = Annotated[int, typer.Option(help="Of an answer.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 where it is faster.")]
Threads = Annotated[int, typer.Option(help="Threads of the models.")]

Own = Callable[..., dict[str, Any]]
"""Takes the options that an experiment has beside those of all, or in place of them, and gives its settings."""


@experiment_app.callback()
def experiments() -> None:
    """Named even where there is but one."""


def _of_all(
    context: typer.Context,
    questions: Questions = None,
    out: Out = None,
    check: Check = False,
    against: Against = None,
    snapshot: SnapshotOption = None,
    index: Index = None,
    limit: Limit = None,
    seed: Seed = 0,
    encoder: Encoder = "embedded",
    passage_model: PassageModel = "",
    generator: Generator = "embedded",
    k: K = 5,
    beams: Beams = 1,
    decoding: Scoring = Decoding.THOROUGH,
    max_new_tokens: MaxNewTokens = 32,
    dtype: Dtype = "float32",
    threads: Threads = 1,
) -> None:
    """The options of all experiments that ask questions of one system."""


def _asking(own: Own) -> Own:
    """A command of the function's name, with the options of all and its own; it runs the module of that name."""
    parameters = signature(_of_all).parameters | signature(own).parameters

    def command(context: typer.Context, **options: Any) -> None:
        _ask(context.info_name or "", options, own(**{name: options[name] for name in signature(own).parameters}))

    command.__signature__ = Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    experiment_app.command(own.__name__.replace("_", "-"), help=own.__doc__)(command)
    return own


@_asking
def open_domain() -> dict[str, Any]:
    """Table 1: exact match on several sets of questions, with passages and without."""
    return {}


@_asking
def retrievers(
    frozen: Annotated[str, typer.Option(help="The encoder before training; the embedded one's is known.")] = "",
    bm25_weight: Annotated[float, typer.Option(help="Of BM25 in the weighted sum.")] = 0.3,
) -> dict[str, Any]:
    """Table 6: BM25, the passages' own encoder, the trained one, both fused: recall and exact match."""
    return {"frozen": frozen, "weight": bm25_weight}


@_asking
def passages(
    k: Annotated[list[int] | None, typer.Option(min=1, max=100, help="So many passages; give each its --k.")] = None,
) -> dict[str, Any]:
    """Figure 3: exact match and recall against the number of passages."""
    if k and len(k) < 2:
        raise InvalidConfig(f"--k must be given twice at least, got --k {k[0]}")
    return {"ks": k} if k else {}


@_asking
def decoding(
    beams: Annotated[
        list[int] | None, typer.Option(min=1, max=32, help="1 is greedy; give each its --beams; 1 and 4.")
    ] = None,
) -> dict[str, Any]:
    """Thorough against fast decoding, RAG-Token, greedy and with beams: exact match and seconds."""
    return {"beams": beams} if beams else {}


@_asking
def diversity() -> dict[str, Any]:
    """Table 5: distinct tri-grams of what is said with passages and without."""
    return {}


@_asking
def posterior(
    ask: Annotated[list[str] | None, typer.Option(help="A question to show; give each its --ask.")] = None,
) -> dict[str, Any]:
    """Figure 2: which passage each token of an answer rests on, p(z|x,y<=t)."""
    return {"shown": ask or ()}


@_asking
def compression(
    factory: Annotated[list[str] | None, typer.Option(help="Of FAISS; give each its --factory.")] = None,
) -> dict[str, Any]:
    """Kinds of index over the same vectors: recall, exact match, bytes and milliseconds."""
    return {"factories": factory or ()}


@_asking
def abstractive(
    label: Annotated[list[str] | None, typer.Option(help="SUPPORTS=true: that word; give each its --label.")] = None,
) -> dict[str, Any]:
    """Table 2: abstractive answers, generated questions, and claims checked (FEVER)."""
    return {"labels": label} if label else {}


@experiment_app.command("memory")
def memory(
    out: Out = None,
    check: Check = False,
    before: Annotated[Path | None, typer.Option(help="Leaders at the first date; 2016-11-26 if not given.")] = None,
    after: Annotated[Path | None, typer.Option(help="Leaders at the second date; 2020-11-27 if not given.")] = None,
    limit: Limit = None,
    seed: Seed = 0,
    encoder: Encoder = "embedded",
    generator: Generator = "embedded",
    k: K = 5,
    formulation: Annotated[Formulation, typer.Option(help="How passages are marginalised out.")] = Formulation.SEQUENCE,
    beams: Beams = 1,
    dtype: Dtype = "float32",
    threads: Threads = 1,
) -> None:
    """World leaders of two dates, published to a running index one after the other: do the answers follow?"""
    from openbook.config import section
    from openbook.experiments.memory import MemorySettings, run
    from openbook.terminal import build_progress

    files.check_place(page := out or Path("memory.html"))
    leaders = {name: path for name, path in (("before", before), ("after", after)) if path}
    settings = section(
        MemorySettings,
        "openbook experiment memory",
        **leaders,
        limit=limit,
        seed=seed,
        encoder={"model": encoder, "dtype": dtype, "n_threads": threads},
        generator={"model": generator, "dtype": dtype, "n_threads": threads},
        k=k,
        formulation=formulation,
        n_beams=beams,
    )
    with build_progress() as on_progress:
        report = run(settings, _command(), on_progress)
    _end(report, page, None, check)


def _ask(name: str, given: dict[str, Any], own: dict[str, Any]) -> None:
    """Run an experiment: its module's `run`, with its `Settings`, of the options of all and what it has of its own."""
    from openbook.config import section
    from openbook.evaluation.run import to_ask
    from openbook.experiments.asking import SNAPSHOT, embedded_snapshot, shipped
    from openbook.experiments.report import numbers_of
    from openbook.terminal import build_progress

    module = import_module(f"openbook.experiments.{name.replace('-', '_')}")
    files.check_place(out := given["out"] or Path(f"{name}.html"))  # written perhaps hours from now
    if (former := given["against"]) and not former.is_file():
        raise InvalidConfig(f"--against: {former}: no such file")
    if former and out.exists() and out.samefile(former):
        raise InvalidConfig(f"--against: {former} is the page that --out replaces: give another --out")
    if former:
        numbers_of(former)  # before hours of answers are to be held to it
    model = {"dtype": given["dtype"], "n_threads": given["threads"]}
    one = {setting: given[option] for setting, option in (("k", "k"), ("n_beams", "beams"))}
    of_embedded = not (given["snapshot"] or given["index"])
    searched: dict[str, Any] = {"snapshot": SNAPSHOT if of_embedded else given["snapshot"]}
    if given["index"]:
        searched["index"] = {"addresses": given["index"], "timeout_s": 60}
    settings = section(
        module.Settings,
        f"openbook experiment {name}",
        questions=given["questions"] or shipped(*module.DATA),
        out=out,
        **searched,
        pages="title",
        encoder={"model": given["encoder"], "passage_model": given["passage_model"], **model},
        generator={"model": given["generator"], **model},
        **{option: given[option] for option in ("limit", "seed", "decoding", "max_new_tokens")},
        **{setting: value for setting, value in one.items() if isinstance(value, int)},  # some take several
        **own,
    )
    for path in settings.questions:  # before the minutes of a build; `abstractive` asks some without labels
        to_ask(path, settings.model_copy(update={"labels": ()}))
    if "labels" in settings.model_fields_set:
        module.with_claims(settings)
    with build_progress() as on_progress:
        if of_embedded:
            embedded_snapshot(on_progress)
        report = module.run(settings, _command(), on_progress)
    _end(report, out, former, given["check"])


def _command() -> str:
    """As it was typed."""
    return shlex.join(["openbook", *sys.argv[1:]])


def _end(report: "Report", out: Path, against: Path | None, check: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from openbook.experiments.kept import folder_of
    from openbook.terminal import console

    here = [("date", f"{date.today():%-d %B %Y}"), ("machine", f"{processor()}, {os.cpu_count()} cores")]
    report = replace(report, made_of=[*report.made_of, *here])
    report.write(out)  # whatever it is held to: it may have taken hours
    if against:
        report = report.against(against)
        report.write(out)
    shutil.rmtree(folder_of(out), ignore_errors=True)  # only now: it goes on to another `--against`
    table = Table.grid(padding=(0, 2))
    for each in report.expected:
        word, within = "ok" if each.is_met else "FAIL", f"({each.low:g} to {each.high:g})"
        table.add_row(word, f"{each.found:.4g}", within, Text(each.what))
    console.print(table)
    print(f"{out}: written")
    if check and not report.is_as_expected:
        raise typer.Exit(1)
