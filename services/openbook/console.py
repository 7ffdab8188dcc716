"""What a terminal gets of texts that others wrote."""

import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Of ASCII and Latin 1, but for the end of a line and the tab. rich lets most of them through."""


def without_controls(text: str) -> str:
    """All of a text that moves no cursor, and tells the terminal nothing else."""
    return CONTROLS.sub("", text)


class SafeConsole(Console):
    """Whatever texts of strangers hold, in passages, names and answers: nothing of it is markup, moves the cursor, or
    tells the terminal anything else. rich counts no width for what is left out here."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))
