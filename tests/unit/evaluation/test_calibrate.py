"""Confidence, fitted to evaluations: right as often as it says, on answers that it was not fitted to."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from openbook.cli import app
from openbook.core import metrics
from openbook.core.confidence import SIGNALS
from openbook.core.types import Float64, Formulation
from openbook.errors import InvalidConfig, InvalidModel
from openbook.evaluation import calibrate as fitting
from openbook.evaluation.calibrate import calibrate, fit
from openbook.evaluation.record import PLAN, PREDICTIONS, Record
from openbook.models.confidence import CONFIDENCE, load_calibration
from openbook.models.embedded import reader_folder

FINGERPRINT = "f" * 32


def answers(n: int, seed: int) -> tuple[Float64, Float64]:
    """(n, s) signals, and whether each answer was right: as probable as a bent sum of them says."""
    random = np.random.default_rng(seed)
    signals = random.normal(size=(n, len(SIGNALS)))
    p = 1 / (1 + np.exp(-3 * np.tanh(signals[:, 0] + signals[:, 3] / 2) + 0.5))
    return signals, (random.random(n) < p).astype(np.float64)


def test_answers_are_right_as_often_as_their_confidence_says() -> None:
    curve = fit(*answers(2000, 0))
    signals, right = answers(4000, 1)
    found = [curve.confidence(row) for row in signals.tolist()]
    assert metrics.reliability(found, right).expected_error < 0.03
    assert metrics.auroc(found, right) > 0.85


def test_what_says_nothing_is_no_reason_to_be_sure() -> None:
    signals, _ = answers(400, 0)
    right = (np.random.default_rng(1).random(400) < 0.4).astype(np.float64)
    curve = fit(signals, right)
    found = [curve.confidence(row) for row in answers(400, 2)[0].tolist()]
    assert np.mean(found) == pytest.approx(0.4, abs=0.05)
    assert max(found) < 0.8


@pytest.mark.parametrize(("n", "n_right"), [(99, 50), (200, 9), (200, 191)])
def test_too_few_answers_of_a_kind_are_refused(n: int, n_right: int) -> None:
    right = np.array([1.0] * n_right + [0.0] * (n - n_right))
    with pytest.raises(InvalidConfig, match=rf"sequence needs at least 100 answers.*got {n}, {n_right} of them right"):
        fit(answers(n, 0)[0], right, "sequence")


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes evaluations of a generator of this fingerprint."""

    class Loaded:
        fingerprint = FINGERPRINT

    monkeypatch.setattr(fitting, "load_generator", lambda name: Loaded())

    def write(
        name: str, seed: int, n: int = 300, fingerprint: str = FINGERPRINT, bare: bool = False, n_kinds: int = 1
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / PLAN).write_text(json.dumps({"generator_fingerprint": fingerprint}))
        records = [
            Record(
                file=name, id=str(i), question=f"{name} {i}", answers=("a",), answer_regex=None,
                formulation=tuple(Formulation)[i % n_kinds], prediction="a", em=bool(right), f1=None, rouge_l=None,
                log_likelihood=-1.0, answer_rank=None, prior_entropy=0.0, passage_ids=(),
                signals=() if bare else signals,
            )
            for i, (signals, right) in enumerate(zip(*map(np.ndarray.tolist, answers(n, seed)), strict=True))
        ]  # fmt: skip
        (folder / PREDICTIONS).write_text("".join(f"{record.model_dump_json()}\n" for record in records))
        return folder

    return write


def test_what_is_written_is_what_the_model_is_served_with(write: Write, tmp_path: Path) -> None:
    (judged,), _ = calibrate(tmp_path, [write("some", 0), write("more", 1)], [write("others", 2)])
    assert (judged.formulation, judged.n_fitted, len(judged.right)) == (Formulation.SEQUENCE, 600, 300)
    errors = [metrics.reliability(each, judged.right).expected_error for each in (judged.before, judged.after)]
    assert errors[1] < errors[0]
    assert judged.error_by_chance == pytest.approx(0.05, abs=0.02)  # 10 bins of 30: sqrt(2 / pi) sqrt(p (1 - p) / 30)
    curve = load_calibration(str(tmp_path), FINGERPRINT)[Formulation.SEQUENCE]
    assert [curve.confidence(row) for row in answers(300, 2)[0].tolist()] == judged.after.tolist()
    with pytest.raises(InvalidModel, match=r"confidence\.json was fitted to generator f{32} by .*, this is other"):
        load_calibration(str(tmp_path), "other")
    written = (tmp_path / CONFIDENCE).read_text()
    (tmp_path / CONFIDENCE).write_text(written.replace(SIGNALS[0], "former"))
    with pytest.raises(InvalidModel, match=r"was fitted to generator f{32} by .*former.*, this is f{32}"):
        load_calibration(str(tmp_path), FINGERPRINT)
    (tmp_path / CONFIDENCE).write_text('{"generator_fingerprint": "f", "curves": {"sequence": {"weights": [1]}}}')
    with pytest.raises(InvalidModel, match=r"confidence\.json: "):
        load_calibration(str(tmp_path), FINGERPRINT)


def test_each_formulation_is_fitted_to_and_judged_by_its_own_answers(write: Write, tmp_path: Path) -> None:
    both, others = write("both", 0, n_kinds=2), write("others", 2, n_kinds=2)
    judged, without = calibrate(tmp_path, [both], [others])
    assert without == []
    assert [each.formulation for each in judged] == [*Formulation]
    curves = load_calibration(str(tmp_path), FINGERPRINT)
    for i, each in enumerate(judged):
        assert curves[each.formulation] == fit(*(of[i::2] for of in answers(300, 0)))
        assert (each.n_fitted, each.right.tolist()) == (150, answers(300, 2)[1][i::2].tolist())


def test_a_formulation_that_no_other_answers_judge_is_fitted_and_shown_without_figures(
    write: Write, tmp_path: Path
) -> None:
    """Judged by answers of formulations that were not fitted to alone, nothing is written."""
    both, others, picture = write("both", 0, n_kinds=2), write("others", 2), tmp_path / "picture.png"
    command = ["calibrate", tmp_path, both, "--on", others, "--picture", picture]
    done = CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)
    assert re.search(r"^ Sequence +150 +300( +[\d.]+){6} *$", done.stdout, re.MULTILINE)
    assert re.search(r"^ Token +150 +0( +-){6} *$", done.stdout, re.MULTILINE)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert load_calibration(str(tmp_path), FINGERPRINT).keys() == {*Formulation}
    (tmp_path / CONFIDENCE).unlink()
    (others / PREDICTIONS).write_text((others / PREDICTIONS).read_text().replace('"sequence"', '"token"'))
    with pytest.raises(InvalidConfig, match=r"others: no answer with formulation sequence to judge by$"):
        calibrate(tmp_path, [write("some", 0)], [others])
    assert not (tmp_path / CONFIDENCE).exists()


def test_a_formulation_of_too_few_answers_is_named_and_the_other_fitted(write: Write, tmp_path: Path) -> None:
    """The command says so too. With no curve at all nothing is written."""
    some, few, others = write("some", 0), write("few", 1, n=20, n_kinds=2), write("others", 2)
    judged, (said,) = calibrate(tmp_path, [few, some], [others])
    assert [(each.formulation, each.n_fitted) for each in judged] == [(Formulation.SEQUENCE, 310)]
    assert said.startswith("token needs at least 100 answers, 10 of them right and 10 wrong, got 10, ")
    assert load_calibration(str(tmp_path), FINGERPRINT).keys() == {Formulation.SEQUENCE}
    command = ["calibrate", tmp_path, few, some, "--on", others]
    done = CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)
    assert done.stdout.splitlines()[-2] == f"no confidence: {said}"
    (tmp_path / CONFIDENCE).unlink()
    with pytest.raises(InvalidConfig, match=r"^sequence needs .* got 10, .*; token needs .* got 10, "):
        calibrate(tmp_path, [few], [others])
    assert not (tmp_path / CONFIDENCE).exists()


def test_what_is_installed_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "calibrate", lambda *of_a_model: pytest.fail("written"))
    with pytest.raises(InvalidConfig, match=rf"^embedded: .* `cp -r {re.escape(str(reader_folder()))} my-model`"):
        CliRunner().invoke(app, ["calibrate", "embedded", "some", "--on", "others"], catch_exceptions=False)


def test_a_model_that_nothing_was_fitted_to_has_no_confidence(tmp_path: Path) -> None:
    assert load_calibration(str(tmp_path), FINGERPRINT) == {}


def test_a_model_that_nothing_can_be_written_beside_is_named(write: Write, tmp_path: Path) -> None:
    some, others = write("some", 0), write("others", 1)
    with pytest.raises(InvalidConfig, match=r"^a/name: confidence\.json is written beside .* save it to one first"):
        calibrate(Path("a/name"), [tmp_path / "nothing is read before"], [others])
    (tmp_path / CONFIDENCE).mkdir()
    with pytest.raises(InvalidConfig, match=r"confidence\.json: cannot be written: "):
        calibrate(tmp_path, [some], [others])


def test_what_cannot_be_fitted_to_is_named(write: Write, tmp_path: Path) -> None:
    some, other, bare = write("some", 0), write("other", 0, fingerprint="g"), write("bare", 0, bare=True)
    begun = write("begun", 0, n=0)
    for fitted, on, message in [
        ([some], [some], r"some: no question that was not fitted to is left to judge by"),
        ([some, other], [], r"other: has answers of generator g, not f{32}"),
        ([other], [some], r"other: has answers of generator g, .* is f{32}"),
        ([some], [bare], r"bare: question 0 has no signals: labels and answers with --follow have none"),
        ([begun], [some], r"begun: holds no answer to be fitted to$"),
        ([tmp_path / "none"], [some], r"none/plan\.json: is not the plan of an evaluation: No such file or directory$"),
    ]:
        with pytest.raises(InvalidConfig, match=message):
            calibrate(tmp_path, fitted, on)
    assert not (tmp_path / CONFIDENCE).exists()


def test_evaluations_are_read_and_not_written_to(write: Write, tmp_path: Path) -> None:
    """They may be another's, and a file of predictions without any would take whatever plan comes next."""
    some, others = write("some", 0), write("others", 1)
    before = {path: path.stat().st_mtime_ns for folder in (some, others) for path in (folder, *folder.iterdir())}
    calibrate(tmp_path, [some], [others])
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (others / PREDICTIONS).unlink()
    with pytest.raises(InvalidConfig, match=r"others/predictions\.jsonl: cannot be read: No such file"):
        calibrate(tmp_path, [some], [others])
    assert not (others / PREDICTIONS).exists()


def test_a_picture_of_no_kind_is_refused_before_the_fit(write: Write, tmp_path: Path) -> None:
    command = ["calibrate", tmp_path, write("some", 0), "--on", write("others", 2), "--picture", tmp_path / "a.bmq"]
    with pytest.raises(InvalidConfig, match=r"a\.bmq: must end with one of .*\.png"):
        CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)
    assert not (tmp_path / CONFIDENCE).exists()


def test_a_line_that_is_cut_inside_a_character_is_named(write: Write, tmp_path: Path) -> None:
    some, others = write("some", 0), write("others", 1)
    n_lines = len((some / PREDICTIONS).read_bytes().splitlines())
    with (some / PREDICTIONS).open("ab") as file:
        file.write('{"file": "é'.encode()[:-1])
    with pytest.raises(InvalidConfig, match=rf"some/predictions\.jsonl:{n_lines + 1}: is not a record of"):
        calibrate(tmp_path, [some], [others])


def test_the_command_says_what_a_fit_is_worth_and_draws_it(write: Write, tmp_path: Path) -> None:
    some, more, others, picture = write("some", 0), write("more", 1), write("others", 2), tmp_path / "picture.png"
    command = ["calibrate", tmp_path, some, more, "--on", others, "--picture", picture]
    with pytest.raises(InvalidConfig, match=r"none/p\.png: must be a file in a folder that exists"):
        CliRunner().invoke(app, [*map(str, command[:-1]), str(tmp_path / "none" / "p.png")], catch_exceptions=False)
    assert not (tmp_path / CONFIDENCE).exists(), "refused before it is fitted"
    done = CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert re.search(r"Sequence +600 +300 ", done.stdout)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert load_calibration(str(tmp_path), FINGERPRINT).keys() == {Formulation.SEQUENCE}


def test_the_command_says_where_it_wrote_and_what_it_replaced(write: Write, tmp_path: Path) -> None:
    command = list(map(str, ["calibrate", tmp_path, write("some", 0), "--on", write("others", 2)]))
    said = [CliRunner().invoke(app, command, catch_exceptions=False).stdout.splitlines()[-1] for _ in range(2)]
    assert said == [f"{tmp_path / CONFIDENCE}: written", f"{tmp_path / CONFIDENCE}: written, in place of a former one"]
