"""Values as files that people read: YAML in the order that we give it, commands in lines of their own."""

from typing import Any

import yaml

MADE = "# Made by `openbook deploy render` from a topology file: change that one."


class Lines(str):
    """A text of several lines, shown as such."""


class _Dumper(yaml.SafeDumper):
    """Lists stand below their key, and no value is named and repeated."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _lines(dumper: yaml.SafeDumper, text: Lines) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


_Dumper.add_representer(Lines, _lines)


def to_yaml(*documents: Any, about: str = "") -> str:
    """Documents of one file, under a comment that says what it is."""
    comments = "\n".join([MADE, *(f"# {line}".rstrip() for line in about.splitlines())])
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return f"{comments}\n{text}"
