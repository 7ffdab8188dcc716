"""What the documentation says can be done can be done: code runs, commands parse, tables are those of the source."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_snapshot
import tiny_checkpoints as tiny
import typer
import yaml
from google.protobuf.descriptor import Descriptor
from prometheus_client import REGISTRY
from scripts import load_script

from openbook import config, errors, telemetry
from openbook.cli import app
from openbook.config import IndexServerSettings
from openbook.deployment.topology import Topology
from openbook.index.client.metrics import TierMetrics
from openbook.index.client.sharded import ShardedIndex
from openbook.index.server.server import IndexServer
from openbook.models.checkpoint import load_generator
from openbook.planning.demand import Machines
from openbook.training.settings import TrainingSettings
from openbook.v1 import answer_pb2

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
CURRENT = {name: text for name, text in TEXTS.items() if name != "CHANGELOG.md"}  # it speaks of what was
CITED = re.compile(r"\[`(test_\w+)`\]\(([^)]+)\)")
COMMANDS = typer.main.get_command(app)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXTS[page], re.MULTILINE | re.DOTALL)


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of all rows below a heading, up to the next one of its kind; code marks left out."""
    _, below = TEXTS[page].split(f"\n## {heading}\n", 1)
    rows = re.findall(r"^\| (.*) \|$", below.split("\n## ")[0], re.MULTILINE)
    return [[cell.strip().replace("`", "") for cell in re.split(r"(?<!\\)\|", row)] for row in rows]


# --- code


@pytest.mark.parametrize("page", [name for name in CURRENT if blocks(name, "python")])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for number, code in enumerate(blocks(page, "python"), start=1):
        compiled = compile(code, f"{page}, block {number}", "exec")
        # These need a running system: tests/e2e/test_whole_system.py and tests/unit/serving/test_protocols.py run them.
        if "Client(" not in code and "OpenAI(" not in code:
            exec(compiled, names)
    if page == "docs/decoding.md":
        dpr = tiny.save(tmp_path / "dpr", tiny.rag().question_encoder, tiny.word_tokenizer())
        bart = tiny.save(tmp_path / "bart", tiny.bart(), tiny.byte_tokenizer())
        names["combine"](dpr, bart, tmp_path / "rag")
        assert load_generator(str(tmp_path / "rag")).fingerprint == load_generator(bart).fingerprint


def settings_files() -> list[tuple[str, str]]:
    """But for what goes over rendered files: tests/integration/test_rendered_manifests.py has those."""
    found = [(name, text) for name in CURRENT for text in blocks(name, "yaml")]
    return [(name, text) for name, text in found if not yaml.safe_load(text).keys() & {"kind", "services"}]


@pytest.mark.parametrize(("page", "text"), settings_files())
def test_the_settings_of_a_page_are_settings(page: str, text: str) -> None:
    values = yaml.safe_load(text)
    if "loop" in values:
        TrainingSettings.model_validate(values)
    elif "machines" in values:
        Machines.model_validate(values)
    else:
        config.parse(values, page)
    assert values


# --- commands


def commands() -> Iterator[tuple[str, str]]:
    """Every `openbook ...` that a page shows on a line of its own."""
    for page in CURRENT:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if found := re.match(r"(?:[A-Z_]+=\S+ )*(openbook .*)", line):
                    yield page, found[1]


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command, or group of commands, that the words begin with, and the words behind it."""
    command: Any = COMMANDS
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def parse(words: list[str]) -> None:
    """Raises what the command line would say of them; nothing is run."""
    command, rest = find(words)
    if rest != ["--help"]:
        assert not getattr(command, "commands", None), f"no such command: {words}"
        command.make_context("openbook", rest)


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_a_command_is_one_that_openbook_has(page: str, line: str) -> None:
    parse(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("line", ["ask who? --kk 5", "ask who? --k five", "ask", "bild", "index"])
def test_a_command_that_openbook_does_not_have_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"No such option|valid integer|Missing parameter|no such command"):
        parse(line.split())


def test_options_named_in_a_sentence_are_options_of_the_command() -> None:
    named = {
        (page, command, option)
        for page, text in CURRENT.items()
        for command, rest in re.findall(r"`openbook ((?:index )?\w+)([^`]*)`", text)
        for option in re.findall(r"--[a-z][a-z0-9-]*", rest)
        if option != "--help"
    }
    assert len(named) > 2
    assert {each for each in named if each[2] not in options(each[1])} == set()


@pytest.mark.parametrize(
    ("page", "command"),
    [("docs/build.md", "build"), ("docs/evaluate.md", "evaluate"), ("docs/loadtest.md", "loadtest")],
)
def test_a_page_of_one_command_names_its_options_and_no_others(page: str, command: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", TEXTS[page]))
    assert named <= options(command) | {"--help"}
    assert [names for names in spellings(command) if not names & named] == []


def spellings(command: str) -> list[set[str]]:
    """Of each of its options, the names that mean it or its opposite."""
    found = [{*each.opts, *each.secondary_opts} for each in find(command.split())[0].params]
    return [names for names in found if all(name.startswith("--") for name in names)]


def options(command: str) -> set[str]:
    return set[str]().union(*spellings(command))


def test_what_make_is_told_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    told = re.compile(r"`make ([a-z-]+)`|^make ([a-z-]+)(?= +#|$)", re.MULTILINE)
    named = {a or b for text in CURRENT.values() for a, b in told.findall(text)}
    assert len(named) > 5
    assert named - targets == set()


# --- tables


def test_the_settings_page_is_up_to_date() -> None:
    script = load_script(ROOT / "docs/tables.py")
    assert TEXTS["docs/settings.md"] == script.page(), "run: python docs/tables.py"
    assert script.comments(config.EncoderSettings)["max_queue"] == "questions waiting; one more is refused"


def test_the_settings_page_is_made_of_the_tree_it_lies_in(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "services/openbook").mkdir(parents=True)
    (tmp_path / "services/openbook/__init__.py").write_text("raise SystemExit('of this tree')")
    script = shutil.copy(ROOT / "docs/tables.py", tmp_path / "docs")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stderr == "of this tree\n"


def test_the_settings_page_has_every_section() -> None:
    shown = set().union(*load_script(ROOT / "docs/tables.py").PARTS.values())
    sections = {name for name, field in TrainingSettings.model_fields.items()} | set(config.Settings.model_fields)
    assert len(sections) > 10
    assert sections <= shown
    below = TEXTS["docs/settings.md"].split("\n## A topology")[1].split("\n### ")[0]
    assert set(re.findall(r"^\| `(\w+)`", below, re.MULTILINE)) == Topology.model_fields.keys()


def test_every_error_has_its_row() -> None:
    rows = [*table("docs/errors.md", "From a running system"), *table("docs/errors.md", "From a command that starts")]
    said = {row[0]: (row[1], row[2]) for row in rows if row[0] not in ("error", "---")}
    raised = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.OpenbookError)}
    assert said == {error.__name__: (error.grpc_code, str(error.http_status)) for error in raised}


@pytest.mark.parametrize(
    ("heading", "whole", "part"),
    [
        ("The request", answer_pb2.AnswerRequest.DESCRIPTOR, answer_pb2.RetrieveRequest.DESCRIPTOR),
        ("The answer", answer_pb2.AnswerResponse.DESCRIPTOR, answer_pb2.RetrieveResponse.DESCRIPTOR),
    ],
)
def test_every_field_of_request_and_answer_has_its_row(heading: str, whole: Descriptor, part: Descriptor) -> None:
    rows = [row for row in table("docs/ask.md", heading) if len(row) > 2 and row[0] not in ("field", "---")]
    named = [(name.strip(), row[1]) for row in rows for name in row[0].split(",")]
    assert sorted(name for name, _ in named) == sorted(whole.fields_by_name)
    assert {name for name, mark in named if mark == "r"} == set(part.fields_by_name)


def test_fields_of_evidence_and_coverage_are_told() -> None:
    for message in (answer_pb2.Evidence, answer_pb2.Coverage, answer_pb2.Label, answer_pb2.Token):
        for name in message.DESCRIPTOR.fields_by_name:
            assert f"`{name}`" in TEXTS["docs/ask.md"], (message.DESCRIPTOR.name, name)


def test_every_metric_has_its_row_and_its_labels(tmp_path: Path) -> None:
    index = ShardedIndex(["127.0.0.1:1"], 1.0)
    server = IndexServer(IndexServerSettings(snapshot=small_snapshot.build(tmp_path)))
    of_telemetry = [each for each in vars(telemetry).values() if hasattr(each, "_labelnames")]
    of_telemetry += [each.__wrapped__.__self__ for each in vars(telemetry).values() if hasattr(each, "__wrapped__")]
    ours = {each._name + "_total" * (each._type == "counter"): set(each._labelnames) for each in of_telemetry}
    for family in (*TierMetrics(index).collect(), *server.metrics.collect()):
        ours[family.name] = set(family._labelnames)
    server._searches.close()
    assert {family.name for family in REGISTRY.collect() if family.name.startswith("openbook_")} <= {
        name.removesuffix("_total") for name in ours
    }
    rows = [row for row in table("docs/operate.md", "Metrics") if row[0].startswith("openbook_") and len(row) == 3]
    assert {row[0]: set(filter(None, row[1].split(", "))) for row in rows} == ours


def test_metrics_named_elsewhere_are_metrics_with_these_labels() -> None:
    rows = [row for row in table("docs/operate.md", "Metrics") if row[0].startswith("openbook_") and len(row) == 3]
    labels = {row[0]: set(row[1].split(", ")) for row in rows}
    named = {each for text in CURRENT.values() for each in re.findall(r"(openbook_[a-z]\w+)((?:\{[^}]*\})?)", text)}
    named = {each for each in named if each[0] not in ("openbook_fields",)}
    assert len(named) > len(labels)
    for name, chosen in named:
        whole = name if name in labels else re.sub("_(bucket|sum|count)$", "", name)
        assert whole in labels, name
        assert set(re.findall(r"(\w+)(?:[=!]|\}|,)", re.sub('"[^"]*"', "", chosen))) <= labels[whole], (name, chosen)


SAID_ELSEWHERE = {
    *("certificate verify failed", "ensurepip is not available", "Too many open files", "Address already in use"),
    "Set host to '",
    # Ours, with a name filled in.
    *("hdrh is not installed", "no index machine suffices", "openbook does not run after", "serving.http_port ="),
}


def test_messages_that_a_page_says_one_may_see_are_messages() -> None:
    sources = "".join(path.read_text() for path in [*ROOT.glob("services/**/*.py"), ROOT / "Makefile"])
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # of a text that is written in parts
    tables = [below.split("\n\n")[0] for text in CURRENT.values() for below in text.split("| you see | do |\n")[1:]]
    cells = [row.split(" | ")[0] for rows in tables for row in rows.splitlines()]
    phrases = [phrase for cell in cells for phrase in re.findall(r"`([^`]+)`", cell)]
    parts = {part.strip() for phrase in phrases for part in re.split(r"\.\.\.|\d+", phrase)}
    assert len(parts) > 30
    assert {part for part in parts - SAID_ELSEWHERE if part not in sources} == set()


# --- links


def test_every_test_that_is_cited_exists() -> None:
    cited = {(page, *link) for page, text in CURRENT.items() for link in CITED.findall(text)}
    assert cited
    missing = [
        f"{page}: {name} in {path}"
        for page, name, path in cited
        if f"def {name}(" not in (ROOT / page).parent.joinpath(path).read_text(encoding="utf-8")
    ]
    assert not missing


def links() -> Iterator[tuple[str, Path, str]]:
    """Page, file and anchor of every link within the repository."""
    for page, text in CURRENT.items():
        for file, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            if "://" not in file:
                yield page, (ROOT / page).parent / file if file else ROOT / page, anchor


def test_every_link_leads_somewhere() -> None:
    found = list(links())
    assert len(found) > 50
    assert [(page, str(file)) for page, file, _ in found if not file.exists()] == []


def test_every_anchor_is_a_heading() -> None:
    def anchors(file: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    assert [(page, anchor) for page, file, anchor in links() if anchor and anchor not in anchors(file)] == []


def test_every_trap_has_its_row() -> None:
    tests = re.findall(r"^def (test_\w+)", (ROOT / "tests/unit/models/test_traps.py").read_text(), re.MULTILINE)
    rows = [name for name, _ in CITED.findall(TEXTS["docs/decoding.md"])]
    assert len(tests) > 20
    assert [name for name in tests if rows.count(name) != 1] == []


def test_each_module_of_more_than_300_lines_has_its_reason() -> None:
    package = ROOT / "services" / "openbook"
    ours = (path for path in package.rglob("*.py") if "v1" not in path.relative_to(package).parts)
    long = {path.relative_to(package).with_suffix("").as_posix() for path in ours if path.read_text().count("\n") > 300}
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("Modules above 300 lines, and why:")[2]
    assert set(re.findall(r"^\| `(\S+)` \| \S", table, re.MULTILINE)) == long
