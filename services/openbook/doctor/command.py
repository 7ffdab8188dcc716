"""The command `openbook doctor`."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path | None, typer.Option(help="YAML settings: the servers in them are asked.")]
Folder = Annotated[Path, typer.Option(help="Whose disk is looked at: where snapshots lie.")]


def doctor(config: Config = None, folder: Folder = Path()) -> None:
    """Look for what may give trouble. Here and at servers: versions, limits, disks, ports, clocks, certificates.

    Exits with 1 if something does not serve.
    """
    from openbook.config import load
    from openbook.doctor.findings import Level, worst
    from openbook.doctor.look import look
    from openbook.terminal import print_finding

    found = []
    for finding in look(load(config), folder):
        print_finding(finding.what, finding.level.name.lower(), finding.says)
        found.append(finding)
    raise typer.Exit(int(worst(found) is Level.ILL))
