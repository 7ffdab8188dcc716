"""What docs/evaluation.md says can be done can be done."""

import re
from pathlib import Path

import typer

from openbook.cli import app

PAGE = (Path(__file__).parents[3] / "docs/evaluation.md").read_text(encoding="utf-8")


def test_its_code_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert "scores" in names


def test_the_options_it_names_are_options_of_the_command() -> None:
    command = typer.main.get_command(app).commands["evaluate"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) - {"--help"}
    assert len(named) > 10
    assert named <= known
