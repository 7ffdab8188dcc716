"""The page of a build says of passages of any length what they are."""

from pathlib import Path

import numpy as np

from openbook.core.types import Passage
from openbook.corpus.report import N_SHOWN, Stages, write_report
from openbook.corpus.sources.limits import Failure
from openbook.index.building.build import build_snapshot


def test_long_passages_share_a_bar_and_count_with_all_their_words(tmp_path: Path) -> None:
    passages = [Passage(i, "d", "t", " ".join(["word"] * n)) for i, n in enumerate((512, 512, 512, 100))]
    build_snapshot(passages, np.eye(4, dtype=np.float32), tmp_path / "s", 1, "Flat", "encoder", "fingerprint")
    write_report(tmp_path / "report.html", tmp_path / "s", Stages(lambda *_: None), [], None)
    page = (tmp_path / "report.html").read_text()
    assert "<td>words of a passage, on average</td><td>409.0</td>" in page
    assert "<title>99 to 109 words: 1 passages</title>" in page
    assert "<title>396 or more words: 3 passages</title>" in page
    assert "up to 400 or more;" in page
    assert ">400 or more words</text>" in page


def test_a_path_of_any_bytes_is_shown(tmp_path: Path) -> None:
    build_snapshot([Passage(0, "d", "t", "x")], np.eye(1, dtype=np.float32), tmp_path / "s", 1, "Flat", "e", "f")
    failures = [Failure("/home/\udcff/a.txt", "a link")]
    write_report(tmp_path / "report.html", tmp_path / "s", Stages(lambda *_: None), failures, None)
    assert "<td>/home/?/a.txt</td><td>a link</td>" in (tmp_path / "report.html").read_text()


def test_what_was_left_out_is_counted_also_where_a_line_stands_for_several(tmp_path: Path) -> None:
    build_snapshot([Passage(0, "d", "t", "x")], np.eye(1, dtype=np.float32), tmp_path / "s", 1, "Flat", "e", "f")
    failures = [Failure("a.jsonl", "and 1300 more that are no documents", 1300), *[Failure("b", "a link")] * N_SHOWN]
    write_report(tmp_path / "report.html", tmp_path / "s", Stages(lambda *_: None), failures, None)
    assert "<p>The first 100 of 1,400.</p>" in (tmp_path / "report.html").read_text()
