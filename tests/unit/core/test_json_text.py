"""Numbers of more digits than Python reads are told in our words."""

import json
import sys

import pytest

from openbook.core.json_text import LongNumber, read_json

LIMIT = sys.get_int_max_str_digits()
LONG = "9" * (LIMIT + 1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"id": %s}', "id"),
        ('{"id": 1, "number_of": -%s, "more": [2]}', "number_of"),
        ('{"outer": [{"inner": [1, [%s]]}]}', "inner"),
        ('{"a b\\u001b[2J": %s}', r"'a b\x1b[2J'"),
        ('{"\\ud800": %s}', r"'\ud800'"),
        ("[[%s]]", "a number"),
        ("%s", "a number"),
    ],
)
def test_a_number_that_is_too_long_is_named_with_its_limit(text: str, named: str) -> None:
    with pytest.raises(LongNumber) as raised:
        read_json(text % LONG)
    assert str(raised.value) == f"{named} must have at most {LIMIT} digits, got {LIMIT + 1}"
    assert read_json(text % LONG[1:]) == json.loads(text % LONG[1:])


def test_a_long_name_of_a_long_number_is_cut() -> None:
    with pytest.raises(LongNumber, match=r"^x{100} must have"):
        read_json(f'{{"{"x" * 5000}": {LONG}}}')


def test_what_is_no_json_is_told_as_ever() -> None:
    for text in (f'{{"id": {LONG}', '{"id": ', "", "nothing"):
        with pytest.raises(json.JSONDecodeError):
            read_json(text)
    with pytest.raises(UnicodeDecodeError):
        read_json(b'"\xff"')
    with pytest.raises(RecursionError):
        read_json(f"[{LONG}, {'[' * 100_000}")
