"""The commands `openbook experiment NAME`: one function each."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from openbook.core.types import Formulation

if TYPE_CHECKING:
    from openbook.experiments.report import Report

experiment_app = typer.Typer(
    no_args_is_help=True, help="The paper's experiments, each a page. See docs/experiments.md."
)

Out = Annotated[Path, typer.Option(help="The page, in HTML.")]
Check = Annotated[bool, typer.Option("--check", help="End with 1 where a number is not as expected.")]
Seed = Annotated[int, typer.Option(help="Equal seeds draw equal questions.")]
Limit = Annotated[int | None, typer.Option(help="Only so many questions, drawn at random.")]


@experiment_app.callback()
def experiments() -> None:
    """Named even where there is but one."""


@experiment_app.command("memory")
def memory(
    out: Out = Path("memory.html"),
    check: Check = False,
    before: Annotated[Path | None, typer.Option(help="Leaders at the first date; 2016-11-26 if not given.")] = None,
    after: Annotated[Path | None, typer.Option(help="Leaders at the second date; 2020-11-27 if not given.")] = None,
    limit: Limit = None,
    seed: Seed = 0,
    encoder: Annotated[str, typer.Option(help="'embedded', a hub name, or a folder.")] = "embedded",
    generator: Annotated[str, typer.Option(help="'embedded', a hub name, or a folder.")] = "embedded",
    k: Annotated[int, typer.Option(help="Passages to read.")] = 5,
    formulation: Annotated[Formulation, typer.Option(help="How passages are marginalised out.")] = Formulation.SEQUENCE,
    beams: Annotated[int, typer.Option(help="Beams; 1 is greedy.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 where it is faster.")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads of the models.")] = 1,
) -> None:
    """World leaders of two dates, published to a running index one after the other: do the answers follow?"""
    from openbook.config import section
    from openbook.experiments.memory import MemorySettings, run
    from openbook.terminal import build_progress

    files = {name: path for name, path in (("before", before), ("after", after)) if path}
    settings = section(
        MemorySettings,
        "openbook experiment memory",
        **files,
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
    _end(report, out, check)


def _command() -> str:
    """As it was typed."""
    return shlex.join(["openbook", *sys.argv[1:]])


def _end(report: "Report", out: Path, check: bool) -> None:
    report.write(out)
    for each in report.expected:
        print(f"{'ok  ' if each.is_met else 'FAIL'}  {each.found:.4g}  ({each.low:g} to {each.high:g})  {each.what}")
    print(f"{out}: written")
    if check and not report.is_as_expected:
        raise typer.Exit(1)
