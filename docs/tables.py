"""Write docs/settings.md: every key of every settings file, from the classes that check them.

    python docs/tables.py

What a key means is the comment behind its field, or the lines of comment above it, so that it is written once.
"""

import ast
import inspect
import io
import sys
import textwrap
import tokenize
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parents[1] / "services"))  # another tree's may be installed

from openbook import config
from openbook.config import Section
from openbook.deployment.topology import Topology
from openbook.evaluation.settings import EvaluationSettings, RankingSettings
from openbook.training.settings import QuestionFile, TrainingSettings

PAGE = Path(__file__).parent / "settings.md"

HEAD = """\
# Settings

Made by `python docs/tables.py` from the classes that check them; edit those. A test holds this page to them.

- A file is YAML: sections, and in them keys. `openbook up --config openbook.yaml` reads it; so do `publish`,
  `snapshots`, `index check`, `keys`, `doctor`, `evaluate` (which models, and `index`) and `index serve`
  (`index_server`). One file may serve all of them.
- `up` hands `index_server` on to the index servers that it starts; snapshot, shard, address and ports it says itself,
  and `tls` counts where there is `index.tls` too. A change there needs another start.
- `OPENBOOK_<SECTION>__<KEY>` in the environment wins over the file: `OPENBOOK_ANSWER__K=10`. Its value is read as YAML:
  `OPENBOOK_INDEX__ADDRESSES='["10.0.0.5:7000"]'`. Secrets belong there, not in the file.
- Options of a command win over both.
- `openbook train` and `openbook deploy render` have files of their own, over which the environment does not win.
- A key that does not exist or stands twice and a value out of range stop the start; the message names file or variable,
  key and, unless it may be a secret, value.
"""


def sections(kind: type[Section]) -> dict[str, type[Section]]:
    """By name, those that a file of these settings has."""
    found = {}
    for name, field in kind.model_fields.items():
        for each in (field.annotation, *get_args(field.annotation)):  # a section, or one that may be none
            if inspect.isclass(each) and issubclass(each, Section):
                found[name] = each
    return found


PARTS: dict[str, dict[str, type[Section]]] = {
    "Serving: `openbook up`, `deploy/serve.yaml`": {
        **sections(config.Settings),
        "index.tls": config.ClientTls,
        "serving.tls": config.ServerTls,
        "access.limits": config.Limits,
        "access.oidc": config.OidcSettings,
    },
    "An index server: `openbook index serve`": {
        "index_server": config.IndexServerSettings,
        "index_server.tls": config.ServerTls,
    },
    "Training: `openbook train`": {
        **sections(TrainingSettings),
        "task.train[], task.validation[]": QuestionFile,
    },
    "Evaluation: what the options of `openbook evaluate` become": {
        "evaluation": EvaluationSettings,
        "retrieval": RankingSettings,
    },
    "A topology: `openbook deploy render`": {"": Topology, **sections(Topology)},
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, kinds in PARTS.items():
        parts.append(f"## {title}\n")
        parts += [_section(name, kind) for name, kind in kinds.items()]
    return "\n".join(parts)


def _section(name: str, kind: type[Section]) -> str:
    about = inspect.cleandoc(kind.__doc__ or "").replace("\n\n", " ").replace("\n", " ")
    schema = kind.model_json_schema()
    said = comments(kind)
    rows = [
        f"| `{key}` | {_type(field, schema.get('$defs', {}))} | {_default(kind, key)} | {said.get(key, '')} |"
        for key, field in schema["properties"].items()
    ]
    heading = [f"### `{name}`\n"] if name else []
    return "\n".join([*heading, f"{about}\n", "| key | value | default | |", "|---|---|---|---|", *rows, ""])


def comments(kind: type) -> dict[str, str]:
    """By field, those of the classes above included: the comment behind it, else the lines of comment before it."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if issubclass(each, Section) and each is not Section:
            own = _own_comments(textwrap.dedent(inspect.getsource(each)))
            found |= {key: comment for key, comment in own.items() if comment}
    return found


def _own_comments(source: str) -> dict[str, str]:
    behind: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            where = behind if token.line[: token.start[1]].strip() else alone
            where[token.start[0]] = token.string.lstrip("# ")
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above: list[str] = []
            line = node.lineno - 1
            while line in alone:
                above.insert(0, alone[line])
                line -= 1
            inside = [behind[n] for n in range(node.lineno, (node.end_lineno or node.lineno) + 1) if n in behind]
            found[node.target.id] = " ".join(above + inside)
    return found


def _default(kind: type[Section], key: str) -> str:
    field = kind.model_fields[key]
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}, ""):
        return "none"
    if isinstance(value, Section):
        return ""
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return f"`{value if not isinstance(value, bool) else str(value).lower()}`"


def _type(field: dict[str, Any], classes: dict[str, Any]) -> str:
    """In words: what a value may be, and its limits."""
    if "$ref" in field:
        return _type(classes[field["$ref"].split("/")[-1]], classes)
    if choices := field.get("anyOf") or field.get("allOf"):
        return " or ".join(_type(each, classes) for each in choices)
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    match field.get("format"), field.get("type"):
        case "path" | "password" as special, _:
            words = {"path": "path", "password": "secret"}[special]
        case _, "array":
            items = field.get("items")
            words = f"list of {_type(items, classes)}" if items else "list"
        case _, "object":
            words = "section" if "properties" in field else "names and values"
        case _, kind:
            words = {"null": "none", "string": "text", "boolean": "`true`, `false`"}.get(str(kind), str(kind))
    return words + _limits(field)


def _limits(field: dict[str, Any]) -> str:
    limits = {
        "minimum": "at least {}",
        "exclusiveMinimum": "above {}",
        "maximum": "at most {}",
        "minLength": "at least {} characters",
        "pattern": "`{}`",
    }
    given = [words.format(str(field[key]).replace("|", "\\|")) for key, words in limits.items() if key in field]
    return f", {', '.join(given)}" if given else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: written")
