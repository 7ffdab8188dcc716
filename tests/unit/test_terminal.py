"""What people see fits into a terminal of 80 columns."""

import json
import re
from dataclasses import asdict, make_dataclass, replace
from io import StringIO
from math import log

import numpy as np
import pytest
from rich.console import Console

from openbook import cli, terminal
from openbook.config import Limits
from openbook.console import SafeConsole
from openbook.core.origin import Origin
from openbook.core.types import Coverage, Decoding, Formulation, Passage, Token
from openbook.corpus.duplicates import Pair, Repeated
from openbook.corpus.former import Changes, Difference
from openbook.corpus.sources.limits import Failure
from openbook.errors import InvalidRequest
from openbook.evaluation.calibrate import Judged
from openbook.index.client.publish import Listed
from openbook.loadtest import screen as loadtest_screen
from openbook.loadtest.outcomes import Log, Reply
from openbook.loadtest.result import Result
from openbook.loadtest.settings import LoadSettings
from openbook.rag.answer import Alternative, Answer, Evidence, Label
from openbook.serving.access.keys import mint
from openbook.serving.access.scopes import Scope

RECALL = {1: 1.0, 5: 0.974, 10: 0.97, 100: 0.933}
ID = "b38af0116e6486da5fcc9138ad098c59"
ORIGIN = Origin(document_digest="0" * 64, start=0, end=499, path="handbook.pdf", section="Life", page=3)
STAGES = ("cache", "encode", "search", "fetch", "generate", "total")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Console:
    console = Console(width=80, record=True, file=StringIO())
    monkeypatch.setattr(terminal, "console", console)
    return console


def test_all_that_is_known_of_where_a_passage_comes_from_is_shown(screen: Console) -> None:
    """Also what an origin does not have yet."""
    further = make_dataclass("Further", [("author", str, "Bell"), ("line", int, 8)], bases=(Origin,), frozen=True)
    known = {**asdict(ORIGIN), "url": "https://a", "language": "en", "date": "1876", "fields": {"open": True}}
    terminal.print_passages([Passage(1, "d", "Title", "text", further(**known))])
    shown = " ".join(screen.export_text().split())
    where = "handbook.pdf · https://a · Life · page 3 · characters 0 to 499 · en · 1876 · open True · Bell · 8"
    assert shown == f"Title 1 {Passage(1, 'd', 'Title', 'text', further(**known)).lasting_id} {where} text"


def answered(text: str, passage: Passage) -> Answer:
    return Answer(
        text=text,
        log_likelihood=-12.345,
        evidence=(Evidence(passage, -12.3456, 0.0, 0.0),),
        formulation=Formulation.SEQUENCE,
        decoding=Decoding.THOROUGH,
        snapshot_id=ID,
        encoder_fingerprint=ID,
        generator_fingerprint=ID,
        complete=False,
        coverage=Coverage(5, 9, missing_shards=(1,)),
        cached=True,
        request_id="id",
        timings=dict.fromkeys(STAGES, 0.999),
    )


def test_no_cell_of_a_list_of_snapshots_is_folded(screen: Console) -> None:
    created = "2026-11-22T04:56:46+00:00"
    terminal.print_snapshots(
        [
            Listed("index-server-0.openbook:7001", "current", ID, created, 2_015_324, "IVF4096,SQ8", 12, RECALL),
            Listed("2026-11-02", "", ID, created, 2, "Flat"),
        ]
    )
    lines = [line.rstrip() for line in screen.export_text().splitlines()]
    assert lines == [
        "index-server-0.openbook:7001  current 12   b38af0116e64  2026-11-22 04:56",
        "    2,015,324 passages  IVF4096,SQ8  recall@1/5/10/100 1.000 0.974 0.970 0.933",
        "2026-11-02                    not served   b38af0116e64  2026-11-22 04:56",
        "    2 passages  Flat  recall not measured",
    ]


def test_the_lines_below_an_answer_are_not_broken(screen: Console) -> None:
    passage = Passage(1, "handbook.pdf", "Telephone", "word " * 100, ORIGIN)
    response = answered("Alexander Graham Bell", passage)
    question = "who invented the [/b] a[i] telephone?"  # no markup
    terminal.print_answer(question, response)
    assert question in screen.export_text(clear=False)
    below = [line.strip("│ ") for line in screen.export_text(clear=False).splitlines()][-5:-1]
    assert below[:3] == [
        "  ".join(f"{stage} 999" for stage in STAGES) + " ms",
        "RAG-Sequence  log p(y|x) -12.345  embedding from cache",
        f"snapshot {ID[:12]}  generator {ID[:12]}",
    ]
    assert below[3].startswith("PARTIAL")
    assert "handbook.pdf · Life · page 3" in screen.export_text(clear=False)


def test_passages_have_the_numbers_that_their_shares_of_tokens_have(screen: Console) -> None:
    response = answered("Bell", Passage(1, "bell", "Telephone", "text"))
    terminal.print_answer("who?", response)
    assert "[1]" not in screen.export_text()
    terminal.print_answer("who?", replace(response, tokens=(Token("Bell", -0.1, (0.0,)),)))
    passage, heading = (line.split() for line in screen.export_text().splitlines() if "[1]" in line)
    assert passage[4:7] == ["[1]", "Telephone", "text"]
    assert heading[-2:] == ["[1]", "│"]


def test_an_answer_has_its_numbers_under_their_names_and_what_it_rests_on_stands_out(screen: Console) -> None:
    rows = [(1.5, 0.6, 0.2), (0.5, 0.4, 0.8)]
    evidence = tuple(
        Evidence(Passage(id, "d", f"Title {id}", "text"), score, log(prior), log(posterior))
        for id, (score, prior, posterior) in enumerate(rows)
    )
    tokens = (Token("Bell", -0.5, (log(0.3), log(0.7))), Token("", -1.0, (log(0.1), log(0.9))))
    other = Alternative("Elisha", log(0.25), (0.0, 0.0), (), ())
    label = Label("Bell", -5.0, log(0.125))
    response = replace(answered("Bell", evidence[0].passage), evidence=evidence, tokens=tokens, answers=(other,))
    terminal.print_answer("who?", replace(response, labels=(label,), confidence=0.0))
    styled = screen.export_text(clear=False, styles=True).splitlines()
    lines = [line.strip("│ ") for line in screen.export_text().splitlines()]
    assert lines[1] == "Bell   right with probability 0.00   of Bell 0.125"
    assert lines[2] == "0.250  Elisha"
    first, second = (number for number, line in enumerate(lines) if "Title" in line)
    assert lines[first].split()[:3] == ["1.5000", "0.600", "0.200"]
    assert lines[second].split()[:3] == ["0.5000", "0.400", "0.800"]
    assert ["\x1b[2m" in styled[number].partition("Title")[0] for number in (first, second)] == [True, False]
    assert [" ".join(line.split()) for line in lines if line[:4] in ("Bell", "(end") and "right" not in line] == [
        "Bell -0.500 0.30 0.70",
        "(end) -1.000 0.10 0.90",
    ]
    assert "PARTIAL: 5 of 9 passages searched, shard 1 missing" in lines


def test_an_answer_held_back_is_not_an_empty_one(screen: Console) -> None:
    response = replace(answered("", Passage(1, "d", "t", "text")), evidence=())
    for abstained in (True, False):
        terminal.print_answer("who?", replace(response, abstained=abstained))
        shown = screen.export_text()
        assert ["(held back)" in shown, "(empty)" in shown] == [abstained, not abstained]


def test_of_passages_in_their_document_the_one_that_was_asked_for_stands_out(screen: Console) -> None:
    passages = [
        Passage(id, "doc.jsonl#1", "" if id else "T", f"text {id}", replace(ORIGIN, path="doc.jsonl"))
        for id in range(2)
    ]
    terminal.print_passages(passages, marked=1)
    shown = screen.export_text(styles=True)
    assert ["\x1b[2mtext 0" in shown, "\x1b[2mtext 1" in shown] == [True, False]
    assert "doc.jsonl#1" in shown, "without a title it is known by its document"
    terminal.print_passages(passages)
    assert "\x1b[2mtext" not in screen.export_text(styles=True)
    terminal.print_answer("who?", answered("Bell", passages[0]))
    assert "doc.jsonl" not in screen.export_text(), "a file of many documents is no place to look"


def test_an_answer_that_did_not_end_by_itself_is_marked(screen: Console) -> None:
    response = answered("Alexander Graham", Passage(1, "bell", "Telephone", "text"))
    for was_cut in (True, False):
        other = Alternative("Elisha", -1.0, (0.0,), (), (), was_cut)
        terminal.print_answer("who?", replace(response, cut=was_cut, answers=(other,)))
        shown = screen.export_text()
        assert [f"{name}   (cut off)" in shown for name in ("Alexander Graham", "Elisha")] == [was_cut] * 2


@pytest.mark.parametrize("width", [60, 80])
def test_who_holds_a_key_and_until_when_is_shown_whole(width: int, screen: Console) -> None:
    tenant, holder = "a-tenant-of-nineteen", "and-a-holder-of-his-own"
    _, record = mint(holder, 0.0, (Scope.ASK, Scope.RETRIEVE), tenant, 86400.0)
    screen.width = width
    terminal.print_keys([record], 0.0)
    names, *lines = screen.export_text().splitlines()

    def shown(name: str, following: str) -> str:
        return "".join(line[names.index(name) : names.index(following)].strip() for line in lines)

    assert shown(" of ", " may ") == f"{tenant}/{holder}"
    assert shown(" expires ", " state ") == "1970-01-02"


def test_keys_are_listed_the_newest_last_and_say_when_they_die(screen: Console) -> None:
    made = [
        mint(name, created, (Scope.ASK,), "", expires)[1]
        for name, created, expires in (("a", 86400.0, 2e5), ("z", 0.0, None))
    ]
    terminal.print_keys(made, 3e5)
    _, first, second = (line.split() for line in screen.export_text().splitlines())
    assert first[1:] == ["z", "ask", "1970-01-01", "never", "alive"]
    assert second[1:] == ["a", "ask", "1970-01-02", "1970-01-03", "expired"]


def test_what_changed_and_what_repeats_is_counted_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    added, changed, removed = (Difference(n=n, first=first) for n, first in ((1, ("a",)), (2, ("b",)), (0, ())))
    terminal.print_changes(
        Changes(added=added, changed=changed, removed=removed, n_as_before=4, n_passages=9, n_kept=7)
    )
    terminal.print_repeated(Repeated(n_read=9, n_equal=1, n_near=3))
    assert capsys.readouterr().out.splitlines() == [
        "documents added: 1 (a)",
        "documents changed: 2 (b, ...)",
        "documents removed: 0",
        "documents as before: 4",
        "passages: 9, of which 7 keep their vectors",
        "passages that repeat one before them: 1 equal, 3 nearly so, of 9",
    ]


def test_what_a_key_may_ask_for_is_shown_on_a_line_each(screen: Console) -> None:
    limits = Limits(questions_per_minute=300, tokens_per_day=200_000)
    _, record = mint("web", 0.0, (Scope.ASK, Scope.RETRIEVE), "acme", 86400.0, limits)
    screen.width = 80
    terminal.print_keys([record], 0.0)
    _, *lines = (line.split("  ") for line in screen.export_text().splitlines())
    assert [[cell.strip() for cell in line if cell.strip()] for line in lines] == [
        [f"ob_{record.prefix}_", "acme/web", "ask retrieve", "1970-01-01", "1970-01-02", "alive"],
        ["300 questions a minute"],
        ["200000 tokens a day"],
    ]


def test_ids_of_strangers_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    id, none = "a\x1b[2J\r\nb", Difference(n=0, first=())
    added = Difference(n=2, first=(id,))
    terminal.print_changes(Changes(added=added, changed=none, removed=none, n_as_before=1, n_passages=9, n_kept=7))
    terminal.print_repeated(Repeated(n_read=9, n_equal=1, first=[Pair(document=id, of=id, text=id)]))
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("documents added: 2 (a [2J b, ...)", "  a [2J b repeats a [2J b: a [2J b")
    assert all(map(str.isprintable, lines))


@pytest.mark.parametrize("control", ["\x1b[2J", "\x1b]52;c;cm0=\x07", "\x9b31m", "\r", "\x7f"])
def test_passages_and_answers_of_strangers_do_nothing_to_the_terminal(
    control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing to the lines of a table, whose widths are as without."""

    def shown(inside: str) -> str:
        text = f"Be{inside}ll"
        origin = replace(ORIGIN, path=text, section=text, url=text, fields={"by": text})
        passage = Passage(1, text, text, f"{text}\n{text} again", origin)
        screen = StringIO()
        monkeypatch.setattr(terminal, "console", SafeConsole(width=80, file=screen))
        terminal.print_passages([passage])
        terminal.print_answer("who?", answered(text, passage))
        return screen.getvalue().replace(passage.lasting_id, "")

    left = "".join(c for c in control if c.isprintable())
    assert shown(control) == shown(left)
    assert "\n    Bell again" in shown(""), "lines of a text stay"


def test_what_an_endpoint_says_does_nothing_to_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise InvalidRequest(said)

    said = "no \x1b]0;title\x07\x9b2Jk\nsecond line"
    monkeypatch.setattr(cli, "app", refused)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == "openbook: no ]0;title2Jk\nsecond line\n"
    log = Log(0.0)
    log.add(6.0, 6.0, 6.1, Reply("UNAVAILABLE", "503", said))
    loadtest_screen.show(Result(LoadSettings(address="h:1"), log.outcomes(), 0.0, 0.0))
    assert "UNAVAILABLE: no ]0;title2Jk" in capsys.readouterr().out


def test_passages_of_strangers_do_nothing_to_the_terminal_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = "né\x1b[2J\x9b31m\x7f"
    terminal.print_passages([Passage(1, text, text, text)], as_json=True)
    line = capsys.readouterr().out
    assert (line[:-1].isprintable(), "né" in line, json.loads(line)["text"]) == (True, True, text)


def test_what_was_left_out_is_counted_also_where_a_line_stands_for_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failures = [Failure("a.csv:7", "not UTF-8"), Failure("a.csv", "and 6 more", 6)]
    with pytest.raises(InvalidRequest), terminal.print_failures(failures):
        raise InvalidRequest("what was left out is told also where nothing comes of the rest")
    assert capsys.readouterr() == (
        "",
        "left out: a.csv:7: not UTF-8\nleft out: a.csv: and 6 more\nleft out: 7 in all\n",
    )


def test_what_is_refused_before_it_begins_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest), terminal.build_progress():
        raise InvalidRequest("no such file")
    assert capsys.readouterr() == ("", "")


def test_a_file_of_questions_has_its_name_in_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.build_progress() as on_progress:
        on_progress("nq[/b].jsonl", 1, 2)
    assert "nq[/b].jsonl" in capsys.readouterr().err


def test_a_step_of_training_shows_its_loss_and_a_validation_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with terminal.training_progress(9) as on_step:
        on_step(1, {"loss": 1.0, "learning_rate": 1e-4, "tokens_per_s": 1234.0})
        on_step(2, {"loss": 3.0, "learning_rate": 1e-4, "tokens_per_s": 1234.0})
        on_step(2, {"validation/loss": 2.5, "validation/recall@1": 0.5, "grad_norm": 7.0})
        on_step(3, {"loss": 1.1, "learning_rate": 1e-4, "tokens_per_s": 1234.0})
    shown = capsys.readouterr().err
    assert "step 2: loss 2.500  recall@1 0.500\n" in shown
    # 0.95 of 1 and 0.05 of 3 are 1.1, and so it stays.
    assert "loss 1.100  rate 1.0e-04  1,234 tokens/s" in " ".join(shown.split("\n")[-2:])


def test_what_a_fit_of_confidence_is_worth_stands_under_its_names(screen: Console) -> None:
    right = np.array([1.0, 1.0, 0.0, 0.0])
    judged = Judged(Formulation.TOKEN, 7, np.array([0.1, 0.2, 0.3, 0.4]), right, right)
    none = Judged(Formulation.SEQUENCE, 7, right[:0], right[:0], right[:0])
    terminal.print_calibration([judged, none])
    _, first, second = (line.split() for line in screen.export_text().splitlines())
    # Fitted, judged, share of right ones; error before and now, by chance; area before and now.
    assert first == ["Token", "7", "4", "0.500", "0.600", "0.000", "0.000", "0.000", "1.000"]
    assert second[:4] == ["Sequence", "7", "0", "-"]


def test_numbers_of_an_evaluation_stand_beside_each_other_by_file_and_formulation(screen: Console) -> None:
    one = ["| {} | {} | 4 | 50.0 (0.0–100.0) | IVF256,SQ8, 9,342 passages, recall@5 0.987 |"]
    several = ["| {} | {} | read | 2 | 0.600 |", "| {} | {} | not found | 1 | – |"]
    of = [("a-long-name-of-a-file", "sequence"), ("a-long-name-of-a-file", "token"), ("b", "sequence"), ("b", "token")]

    def table(titles: str, rows: list[str]) -> list[str]:
        titles = f"| questions | formulation | {titles} |"
        return [titles, re.sub("[^|]+", " --- ", titles), *(row.format(*each) for each in of for row in rows)]

    where = table(r"answer | n | median p(y\|x) of the wrong", several)
    terminal.print_summary("\n".join(["# Evaluation", "", *table("n | EM | index", one), "", "## Where", *where]))
    lines = screen.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.count("50.0 (0.0–100.0)") for line in lines if line.startswith(" EM ")] == [3, 1]
    at = lines.index("Where")
    assert [" ".join(line.split()) for line in lines[at + 1 : at + 5]] == [
        "a-long-name-of-a-file, sequence",
        "answer n median p(y|x) of the wrong",
        "read 2 0.600",
        "not found 1 –",
    ]


def test_a_folder_has_its_name_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.console.print("building var[/b]/:m:")
    terminal.print_finding("a[/b]", "ill", "b[/b]")
    assert capsys.readouterr().out == "building var[/b]/:m:\nill   a[/b]: b[/b]\n"


def test_one_is_not_many() -> None:
    said = [terminal.counted(n, "year") for n in (0, 1.0, 1.5, 21_000_000)]
    assert said == ["0 years", "1 year", "1.5 years", "21000000 years"]
