"""How a question is asked, apart from what is asked: one value that crosses every hop."""

from dataclasses import dataclass

from openbook.core.deadline import Deadline
from openbook.errors import InvalidRequest

MAX_CHARS = 128
NEVER = Deadline.never()


@dataclass(frozen=True, slots=True)
class Context:
    """When the answer is due and on whose behalf it is sought. Texts are empty where nothing is known.

    Raises:
        InvalidRequest: a text is too long, or not of printable ASCII: it goes into logs and headers.
    """

    deadline: Deadline = NEVER
    request_id: str = ""  # what log lines of every tier are found by
    caller: str = ""  # who asks: the holder of the key, or where none is needed as he says himself
    trace: str = ""  # W3C traceparent
    tenant: str = ""  # whose caller that is: what one tenant asked, another learns nothing of

    def __post_init__(self) -> None:
        if not (self.request_id or self.caller or self.trace or self.tenant):
            return
        for name in ("request_id", "caller", "trace", "tenant"):
            check_harmless(name, getattr(self, name))


def check_harmless(name: str, text: str) -> None:
    """Raises InvalidRequest: the text named so is not `is_harmless`."""
    if not is_harmless(text):
        shown = f"{text!a:.60}"
        raise InvalidRequest(f"{name} must have at most {MAX_CHARS} printable ASCII characters, got {shown}")


def is_harmless(text: str) -> bool:
    """Whether it may stand in a log line and a header."""
    return len(text) <= MAX_CHARS and text.isascii() and text.isprintable()
