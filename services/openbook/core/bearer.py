"""How a caller shows his key, over either protocol: `gate.credential` reads it."""

from openbook.errors import InvalidConfig


def bearer(api_key: str | None) -> str:
    """The value of `authorization`; empty without a key. White space around a key, as files end with, is none of it.

    Raises:
        InvalidConfig: no header holds it. What it is stands in no message.
    """
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidConfig("the API key must be of printable ASCII characters, and has others")
    return f"Bearer {key}" if key else ""
