"""Options of a command that exclude each other."""

from collections.abc import Container

import typer

from openbook.errors import InvalidRequest


def refuse_beside(said: str, context: typer.Context, names: Container[str | None]) -> None:
    """Refuse what is on the command line and would do nothing.

    Raises:
        InvalidRequest: one of these parameters is there; says its option beside what was `said`.
    """
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            raise InvalidRequest(f"{said} has no use for {option.opts[0]}")
