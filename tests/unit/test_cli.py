"""What commands say of what they are given and of where they print."""

import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from openbook import cli, terminal
from openbook.core.types import Passage

ROOT = Path(__file__).parents[2]
PASSAGE = Passage(1, "Bell", "Bell", "a café … \N{GRINNING FACE}")


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_a_terminal_that_has_not_all_letters_shows_the_others(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        terminal.print_passages([PASSAGE])
        terminal.print_passages([PASSAGE], as_json=True)

    monkeypatch.setattr(cli, "app", command)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    cli.main()
    sys.stdout.flush()
    shown = sys.stdout.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    *lines, as_json = shown.splitlines()
    assert PASSAGE.text.encode(encoding, "replace").decode(encoding) in "\n".join(lines)
    assert json.loads(as_json)["text"] == PASSAGE.text, "nothing is lost in what programs read"


def test_keys_in_no_file_are_not_listed(tmp_path: Path) -> None:
    missing = tmp_path / "nosuch"
    for command in (["list"], ["revoke", "ob_1"]):
        refused = run("keys", *command, "--file", missing)
        assert str(refused.exception) == f"{missing}: no such file; `openbook keys add` makes it"


def test_who_makes_a_key_hears_where_it_is_kept(tmp_path: Path) -> None:
    made = run("keys", "add", "web", "--file", tmp_path / "keys")
    assert f"_... in {tmp_path / 'keys'}: ask, retrieve; " in made.stderr
    assert made.stdout.startswith("ob_")


def test_a_key_is_kept_in_a_folder_that_exists(tmp_path: Path) -> None:
    """A misspelt one would hold a key that no endpoint knows."""
    refused = run("keys", "add", "web", "--file", tmp_path / "misspelt" / "keys")
    assert str(refused.exception) == f"{tmp_path / 'misspelt' / 'keys'}: cannot be written: No such file or directory"
    assert not (tmp_path / "misspelt").exists()


def test_a_folder_without_snapshots_says_so(tmp_path: Path) -> None:
    said = run("snapshots", tmp_path)
    assert (said.exit_code, said.stdout, said.stderr) == (0, "", f"{tmp_path}: holds no snapshot\n")


def test_what_is_neither_a_folder_nor_an_address_holds_no_snapshots(tmp_path: Path) -> None:
    expected = "a server must be host:port with a port of 1..65535"
    for name in ("nosuch", "nosuch:0"):
        refused = run("snapshots", tmp_path, name)
        assert str(refused.exception) == f"{name}: no such folder, and {expected}"


def test_a_server_that_is_no_address_is_refused_by_the_name_of_its_option(tmp_path: Path) -> None:
    for option, words in (
        ("--index", ("publish", tmp_path, "--index", "a:1", "--index", "nosuch")),
        ("--index", ("evaluate", tmp_path, "--out", tmp_path / "new", "--index", "nosuch")),
        ("ADDRESS", ("index", "check", "nosuch")),
    ):
        refused = run(*words)
        assert str(refused.exception) == f"{option} must be host:port with a port of 1..65535, got 'nosuch'"


def test_passages_are_found_in_folders_alone() -> None:
    refused = run("passages", "find", "localhost:9000", "--title", "x")
    what = "find reads a snapshot's folder, and asks no endpoint"
    assert str(refused.exception) == f"localhost:9000: no such folder; {what}"


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback() -> None:
    module, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["openbook"].split(":")
    code = f"""
import signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from {module} import {function}
{function}()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
