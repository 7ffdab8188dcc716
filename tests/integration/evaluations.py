"""What tests of evaluations share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of JSON lines, and where it is."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def stopping(after: int) -> Callable[[str, int, int], None]:
    """Told of progress, it interrupts as a user would, once so much is done."""

    def on_progress(stage: str, done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    return on_progress
