"""`openbook plan`: what is wanted in, machines, their cost and a topology out."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from openbook.errors import InvalidConfig, InvalidRequest
from openbook.options import refuse_beside

D = "Numbers of an embedding: 384 of the embedded encoder, 768 of DPR's."


def plan(
    context: typer.Context,
    passages: Annotated[int, typer.Option(help="In the index, today.")] = 0,
    dimension: Annotated[int, typer.Option(help=D)] = 384,
    words: Annotated[float, typer.Option(help="Of a passage.")] = 100,
    index: Annotated[
        str | None, typer.Option(help="Flat, HNSW32, 'IVF,SQ8', 'IVF,RaBitQfs'; else the cheapest.")
    ] = None,
    recall: Annotated[float, typer.Option(help="At 10, that the index must have.")] = 0.9,
    exact_dtype: Annotated[str, typer.Option(help="As of `openbook build`: float32 or float16.")] = "float32",
    questions_per_s: Annotated[float, typer.Option("--questions-per-s", "--rate", help="At the busiest hour.")] = 1.0,
    p99_s: Annotated[float, typer.Option("--p99", help="Seconds that one answer in a hundred may take longer.")] = 10.0,
    growth: Annotated[float, typer.Option(help="A year, of passages and questions: 0.5 is half as many more.")] = 0.0,
    years: Annotated[float, typer.Option(help="That it is to last.")] = 1.0,
    failures: Annotated[int, typer.Option(help="Machines of each kind that may be lost.")] = 1,
    generator_parameters: Annotated[float, typer.Option(help="Of the generator; the embedded one's.")] = 30.0e6,
    machines: Annotated[
        Path | None, typer.Option(help="YAML of machines and prices; an example's if not given.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="What --calibrate wrote, on machines like those.")] = None,
    topology: Annotated[Path | None, typer.Option(help="Write it, a new file: for `openbook deploy render`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as JSON.")] = False,
    calibrate: Annotated[Path | None, typer.Option(help="Measure this machine, a minute, into this file.")] = None,
) -> None:
    """How many machines of which kind, for how much, and what will break first."""
    from openbook import files
    from openbook.config import section
    from openbook.planning import constants, demand, screen
    from openbook.planning.plan import plan

    if calibrate:
        refuse_beside("--calibrate only measures, and", context, context.params.keys() - {"calibrate"})
        return _calibrate(calibrate)
    if not passages:
        raise InvalidRequest("--passages must be given, or --calibrate")
    if topology and topology.is_file():  # with what was added by hand
        raise InvalidConfig(f"{topology}: is there already: name a new file")
    if topology and not topology.exists():  # a device is
        files.check_place(topology)
    known = constants.constants(calibration)
    wanted = section(
        demand.Demand,
        "openbook plan",
        passages=passages,
        dimension=dimension,
        words=words,
        index=index,
        recall=recall,
        exact_dtype=exact_dtype,
        questions_per_s=questions_per_s,
        p99_s=p99_s,
        growth=growth,
        years=years,
        failures=failures,
        generator_parameters=generator_parameters,
    )
    found = plan(wanted, demand.machines(machines), known)
    if topology:
        from openbook.planning.topology import text

        topology.write_text(text(found), encoding="utf-8")
    if as_json:
        print(
            json.dumps(
                {
                    **_plain(asdict(found)),
                    "demand": wanted.model_dump(),
                    "assumptions": {k: asdict(v) for k, v in known.items()},
                },
                indent=2,
            )
        )
    else:
        screen.show(found, known)
        if topology:
            print(f"{topology}: for `openbook deploy render`, once it says where the machines are")
    return None


def _calibrate(out: Path) -> None:
    import yaml

    from openbook import files
    from openbook.planning.calibrate import calibrate
    from openbook.terminal import build_progress

    files.check_place(out)
    with build_progress() as on_step:
        found = calibrate(lambda what, done, total: on_step("calibrate", done, total))
    files.write(out, yaml.safe_dump(found.model_dump(), sort_keys=False))
    print(f"{out}: {found.machine}")


def _plain(value: Any) -> Any:
    """With models as mappings."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.model_dump() if hasattr(value, "model_dump") else value
