import re

import grpc
import pytest

from openbook import errors
from openbook.errors import OpenbookError, from_grpc_code
from openbook.training import loop


def all_errors() -> list[type[OpenbookError]]:
    return [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, OpenbookError)]


def test_every_code_is_one_of_grpcs() -> None:
    assert {error.grpc_code for error in all_errors()} <= {code.name for code in grpc.StatusCode}


def test_the_tree_drawn_at_the_top_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = dict(re.findall(r"[├└]── (\w+) +([A-Z_]+) +\d+", errors.__doc__))
    assert len(drawn) > 8
    statuses = {name: int(status) for name, status in re.findall(r"[├└]── (\w+) +[A-Z_]+ +(\d+)", errors.__doc__)}
    for error in all_errors():
        assert error.__name__ in errors.__doc__
        if error.__name__ in drawn:
            assert (drawn[error.__name__], statuses[error.__name__]) == (error.grpc_code, error.http_status)


SHARE_A_CODE = (errors.StartupError, errors.ModelUnavailable, errors.KeysUnavailable)


@pytest.mark.parametrize("error", [e for e in all_errors() if OpenbookError in e.__bases__ and e not in SHARE_A_CODE])
def test_an_error_that_crossed_the_wire_is_itself_again(error: type[OpenbookError]) -> None:
    back = from_grpc_code(error.grpc_code, "k must be 1..100, got 0")
    assert type(back) is error
    assert str(back) == "k must be 1..100, got 0"


def test_an_error_of_training_is_none_of_the_wire() -> None:
    assert loop.TrainingDiverged.grpc_code == OpenbookError.grpc_code
    assert type(from_grpc_code(OpenbookError.grpc_code, "broken")) is OpenbookError


def test_a_code_that_is_none_of_ours_stays_readable() -> None:
    assert str(from_grpc_code("UNIMPLEMENTED", "no such method")) == "UNIMPLEMENTED: no such method"
