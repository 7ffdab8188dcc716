"""Commands as the documentation says them, to be carried out."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page: str, heading: str) -> list[str]:
    """Those for a shell below a heading, up to the next heading."""
    _, below = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)
    return re.findall(r"^```sh\n(.*?)^```", below.split("\n## ")[0], re.MULTILINE | re.DOTALL)


def commands(page: str, heading: str) -> list[list[str]]:
    """The words of each of their lines, without comments."""
    lines = "".join(blocks(page, heading)).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
