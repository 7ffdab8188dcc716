"""The file of predictions: what is kept of it after an interruption, and whom it refuses."""

from pathlib import Path
from typing import Any

import pytest

from openbook.core.types import Formulation
from openbook.errors import InvalidConfig
from openbook.evaluation.record import PREDICTIONS, Log, Record, RecordLog, read_plan

PLAN = {"k": 5, "index": {"snapshot_id": "abc"}, "formulations": ["token"]}


def record(number: int, **fields: Any) -> Record:
    values: dict[str, Any] = {
        "file": "f", "id": str(number), "question": "who — né?", "answers": ("a",), "answer_regex": None,
        "formulation": Formulation.TOKEN, "prediction": "b", "em": False, "f1": 0.1 + 0.2, "rouge_l": 0.0,
        "log_likelihood": -1 / 3, "answer_rank": None, "prior_entropy": 0.5, "passage_ids": (3, 1),
    }  # fmt: skip
    return Record(**{**values, **fields})


def test_what_is_written_is_read_to_the_bit(tmp_path: Path) -> None:
    records = [record(i) for i in range(3)]
    log = Log(tmp_path / "new" / "folder", PLAN)
    log.append(records[:2])
    log.append(records[2:])
    assert log.read() == records
    assert Log(tmp_path / "new" / "folder", PLAN).read() == records


@pytest.mark.timeout(10)  # the other one is not waited for
def test_only_one_process_writes_to_a_folder(tmp_path: Path) -> None:
    with (
        Log.alone(tmp_path),
        pytest.raises(InvalidConfig, match="another process is at work here"),
        Log.alone(tmp_path),
    ):
        pass
    with Log.alone(tmp_path):
        pass


@pytest.mark.parametrize(("torn", "n_batches", "n_lines"), [(0, 2, 4), (1, 1, 2), (80, 1, 2), (10**6, 0, 0)])
def test_whole_batches_are_kept_and_the_rest_cut_off(tmp_path: Path, torn: int, n_batches: int, n_lines: int) -> None:
    log = Log(tmp_path, PLAN)
    log.append([record(i) for i in range(4)])
    path = tmp_path / PREDICTIONS
    path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - torn)])
    assert log.keep([2, 2, 1]) == n_batches
    assert [each.id for each in log.read()] == [str(i) for i in range(n_lines)]


def test_half_a_batch_of_whole_lines_is_cut_off_too(tmp_path: Path) -> None:
    log = Log(tmp_path, PLAN)
    log.append([record(i) for i in range(5)])
    assert log.keep([3, 3]) == 1
    assert len(log.read()) == 3


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({**PLAN, "k": 6}, "k is 5 there and 6 here"),
        ({**PLAN, "index": {"snapshot_id": "abd"}}, 'snapshot_id is "abc" there and "abd" here'),
        ({**PLAN, "index": None}, 'index is {"snapshot_id": "abc"} there and none here'),
        ({**PLAN, "formulations": ["token", "sequence"]}, "formulations is"),
        ({**PLAN, "limit": 3}, "limit is none there and 3 here"),
    ],
)
def test_another_plan_is_refused(tmp_path: Path, other: dict[str, Any], difference: str) -> None:
    Log(tmp_path, PLAN).append([record(0)])
    with pytest.raises(InvalidConfig) as refused:
        Log(tmp_path, other)
    assert difference in str(refused.value)
    assert len(Log(tmp_path, PLAN).read()) == 1, "and nothing is lost"


def test_a_model_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    plan = {**PLAN, "encoder": "/old", "encoder_fingerprint": "abc"}
    Log(tmp_path, plan).append([record(0)])
    assert len(Log(tmp_path, {**plan, "encoder": "/new"}).read()) == 1
    with pytest.raises(InvalidConfig, match='encoder is "/old" there and "/new" here'):
        Log(tmp_path, {**plan, "encoder": "/new", "encoder_fingerprint": "abd"})
    with pytest.raises(InvalidConfig, match='encoder_fingerprint is "abc" there and "abd" here'):
        Log(tmp_path, {**plan, "encoder_fingerprint": "abd"})


def test_an_evaluation_that_answered_nothing_keeps_nobody_to_its_plan(tmp_path: Path) -> None:
    """It failed before its first answer, and the settings were corrected."""
    corrected = {**PLAN, "k": 6}
    Log(tmp_path, PLAN)
    Log(tmp_path, corrected).append([record(0)])
    assert read_plan(tmp_path) == corrected
    assert len(Log(tmp_path, corrected).read()) == 1


def test_a_folder_of_the_other_kind_is_refused_also_where_nothing_is_answered(tmp_path: Path) -> None:
    Log(tmp_path, PLAN)
    with pytest.raises(InvalidConfig, match="holds another evaluation: k is 5 there and none here: "):
        RecordLog(tmp_path, {"n_passages": 100}, Record, "rankings.jsonl")
    assert read_plan(tmp_path) == PLAN


def test_predictions_of_an_unknown_plan_are_refused(tmp_path: Path) -> None:
    (tmp_path / PREDICTIONS).write_text("precious\n")
    with pytest.raises(InvalidConfig, match=r"holds predictions\.jsonl without a plan\.json"):
        Log(tmp_path, PLAN)
    assert (tmp_path / PREDICTIONS).read_text() == "precious\n"


def test_a_plan_that_is_none_is_named(tmp_path: Path) -> None:
    for content, problem in (("{", r"plan\.json: is not the plan"), ("[]", "must map keys to values")):
        (tmp_path / "plan.json").write_text(content)
        with pytest.raises(InvalidConfig, match=problem):
            Log(tmp_path, PLAN)


def test_an_altered_line_is_named(tmp_path: Path) -> None:
    log = Log(tmp_path, PLAN)
    log.append([record(0)])
    with (tmp_path / PREDICTIONS).open("a") as file:
        file.write('{"id": 7}\n')
    with pytest.raises(InvalidConfig, match=r"predictions\.jsonl:2: is not a record of this evaluation: file: [^\n]*$"):
        log.read()
