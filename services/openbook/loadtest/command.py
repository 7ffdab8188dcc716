"""The commands `openbook loadtest` and `openbook loadtest-merge`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from openbook.core.types import Decoding, Formulation
from openbook.errors import InvalidRequest
from openbook.loadtest.kinds import Arrivals, Check, What
from openbook.options import refuse_beside

if TYPE_CHECKING:
    from openbook.loadtest.result import Result
    from openbook.loadtest.settings import LoadSettings

OURS = ("output", "find_knee", "max_p99_s", "min_goodput")
Output = Annotated[Path | None, typer.Option(help="A new folder for figures, histograms, seconds and report.html.")]


def loadtest(
    context: typer.Context,
    address: Annotated[
        str, typer.Argument(help="host:port speaks gRPC, http://host:port HTTP; grpcs:// and https:// with TLS.")
    ],
    what: Annotated[What, typer.Option(help="Answers, answers token by token, or passages alone.")] = What.ANSWER,
    rate: Annotated[float, typer.Option(help="Questions a second, whatever becomes of them.")] = 1.0,
    duration_s: Annotated[
        float, typer.Option("--duration-s", "--duration", help="Seconds that are measured, after the warm-up.")
    ] = 30.0,
    warm_up_s: Annotated[float, typer.Option("--warm-up-s", "--warm-up", help="Seconds before, not counted.")] = 5.0,
    arrivals: Annotated[Arrivals, typer.Option(help="How the rate is spread over time.")] = Arrivals.POISSON,
    cv: Annotated[float, typer.Option(help="Of gamma's gaps: deviation over mean. Above 1 come bursts.")] = 2.0,
    closed: Annotated[
        int | None, typer.Option(help="A closed loop in place of a rate: so many callers, who wait for their answers.")
    ] = None,
    find_knee: Annotated[bool, typer.Option("--find-knee", help="Search the highest rate that holds.")] = False,
    min_goodput: Annotated[float, typer.Option(help="Share of the offered that holds.")] = 0.99,
    max_p99_s: Annotated[
        float | None, typer.Option("--max-p99-s", "--max-p99", help="Seconds at which a rate holds no more.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="One a line, or JSON lines; about the embedded corpus if not given.")
    ] = None,
    zipf: Annotated[float, typer.Option(help="The n-th question comes n^-ZIPF times as often; 0: all alike.")] = 1.0,
    replay: Annotated[bool, typer.Option("--replay", help="Ask in the order of the file, again and again.")] = False,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal times and questions.")] = 0,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", "--timeout", help="The deadline that each request states.")
    ] = 10.0,
    caller: Annotated[str | None, typer.Option(help="Who asks, as x-caller.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Who signed the endpoint's certificate, in PEM.")] = None,
    k: Annotated[int | None, typer.Option(help="Passages to retrieve.")] = None,
    formulation: Annotated[Formulation | None, typer.Option(help="How passages are marginalised out.")] = None,
    decoding: Annotated[Decoding | None, typer.Option(help="How RAG-Sequence scores its candidates.")] = None,
    n_beams: Annotated[int | None, typer.Option("--n-beams", "--beams", help="1 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Of an answer.")] = None,
    check: Annotated[
        Check | None, typer.Option(help="Equal questions must get equal texts and passages; or equal bits.")
    ] = None,
    processes: Annotated[int, typer.Option(help="That send; each needs a core.")] = 1,
    connections: Annotated[int, typer.Option(help="Over gRPC, of each process.")] = 16,
    max_in_flight: Annotated[int, typer.Option(help="Of each process; more are not sent: an error.")] = 20_000,
    output: Output = None,
) -> None:
    """Measure what callers get from an endpoint under load. docs/loadtest.md explains every number."""
    from openbook.config import section
    from openbook.loadtest import folder, screen
    from openbook.loadtest.settings import LoadSettings

    asked = {name: value for name, value in context.params.items() if name not in OURS}
    settings = section(LoadSettings, "openbook loadtest", **asked)
    if find_knee and closed is not None:
        raise InvalidRequest(f"--find-knee raises a rate, and --closed {closed} has none: give one of them")
    for said, is_said, without_use in (
        (f"--closed {closed}", closed is not None, ("rate", "arrivals", "cv")),
        (f"--arrivals {arrivals}", arrivals is not Arrivals.GAMMA, ("cv",)),
        ("--replay", replay, ("zipf",)),
        (f"--what {what}", what is What.RETRIEVE, ("formulation", "decoding", "n_beams", "max_new_tokens")),
        ("a run without --find-knee", not find_knee, ("min_goodput", "max_p99_s")),
    ):
        if is_said:
            refuse_beside(said, context, without_use)
    if not 0 < min_goodput <= 1 or (max_p99_s is not None and not max_p99_s > 0):
        got = f"{min_goodput} and {max_p99_s}"
        raise InvalidRequest(f"--min-goodput must be above 0, at most 1, --max-p99-s above 0, got {got}")
    if output:
        folder.check_free(output)
    if find_knee:
        _find_knee(settings, min_goodput, max_p99_s, output)
        return
    result = _measured(settings)
    screen.show(result)
    _finish(result, output)


def loadtest_merge(
    folders: Annotated[list[Path], typer.Argument(help="What --output wrote on each machine.")],
    output: Output = None,
) -> None:
    """Put runs that several machines made at the same time together, as if one had. Rates add up."""
    from openbook.loadtest import folder, screen

    if output:
        folder.check_free(output)
    result = folder.merge(folders)
    screen.show(result)
    _finish(result, output)


def _measured(settings: "LoadSettings") -> "Result":
    from openbook.loadtest.run import run
    from openbook.loadtest.screen import load_progress

    with load_progress(settings) as on_progress:
        return run(settings, on_progress)


def _finish(result: "Result", output: Path | None) -> None:
    """The figures are kept whatever they are worth; then they are judged."""
    if output:
        from openbook.loadtest import folder

        folder.write(output, result)
    result.check()


def _find_knee(settings: "LoadSettings", min_goodput: float, max_p99_s: float | None, output: Path | None) -> None:
    from openbook.loadtest import folder, knee, screen

    def measure(step: "LoadSettings") -> "Result":
        result = _measured(step)
        screen.show_step(result)
        return result

    found = knee.find(settings, knee.Limits(min_goodput, max_p99_s), measure)
    screen.show_knee(found)
    if output:
        folder.write_knee(output, found)
    for step in found.steps:
        if step.measured.n_wrong or found.rate is found.above is None:  # nothing was found
            step.check()
