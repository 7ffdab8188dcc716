"""What commands say of what they are given and of where they print."""

import io
import json
import sys

import pytest

from openbook import cli, terminal
from openbook.core.types import Passage

PASSAGE = Passage(1, "Bell", "Bell", "a café … \N{GRINNING FACE}")


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
