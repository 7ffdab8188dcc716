"""Settings that nobody shall read in a log: their types, what can be told of a bad value without showing one, and how a
key is shown to whom it is for."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Secret, SecretBytes, SecretStr

from openbook.errors import InvalidConfig

AnySecret = TypeVar("AnySecret", SecretStr, Secret[str])

SHOWN = re.compile(r"(\w+://)?\*{3,}(@.*)?", re.DOTALL)
"""How a secret is shown, in a message or in JSON."""

SHAREABLE = re.compile(r"(\w+)://([^/?#]*@)?([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/\d*)?")
"""Scheme, user and password, host, port and database of a URL in which a password can stand in one place only."""


def _is_the_secret(value: AnySecret) -> AnySecret:
    if SHOWN.fullmatch(value.get_secret_value()):
        raise ValueError("asterisks are how a secret is shown, not the secret")
    return value


def _for_header(secret: str) -> str:
    """Without white space around it, as files end with. Raises ValueError: no header holds it; gRPC would show it."""
    secret = secret.strip()
    if not (secret.isascii() and secret.isprintable()):
        raise ValueError("must be of printable ASCII characters, and has others")
    return secret


def _fits_a_header(value: SecretStr) -> SecretStr:
    return SecretStr(_for_header(value.get_secret_value()))


def bearer(api_key: str | None) -> str:
    """How a caller shows his key, over either protocol: the value of `authorization`; empty without a key.

    Raises:
        InvalidConfig: no header holds it. What it is stands in no message.
    """
    try:
        key = _for_header(api_key or "")
    except ValueError as error:
        raise InvalidConfig(f"the API key {error}") from None
    return f"Bearer {key}" if key else ""


def _digits_are_text(value: Any) -> Any:
    """YAML reads a token of digits as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


class RedisUrl(Secret[str]):
    """Where a Redis listens, and perhaps its password: shown without it, and where that is not certain, not at all."""

    def _display(self) -> str:
        url = self.get_secret_value()
        if not (parts := SHAREABLE.fullmatch(url)):
            return "***"
        scheme, user, host, port, database = parts.groups(default="")
        return f"{scheme}://{'***@' if user else ''}{host}{port}{database}"


SecretText = Annotated[SecretStr, BeforeValidator(_digits_are_text), AfterValidator(_is_the_secret)]
SecretToken = Annotated[SecretText, AfterValidator(_fits_a_header)]
SecretRedisUrl = Annotated[RedisUrl, AfterValidator(_is_the_secret)]


def told(kind: type[BaseModel], problem: str, location: Sequence[str], value: object) -> str:
    """Name and value of what is wrong in a model, and a colon, as far as there cannot be a secret in them.

    Args:
        kind: the model.
        problem: pydantic's type of the error.
        location: the names that lead to it.
        value: what was given.
    """
    names, hidden = list(location), _may_hold_secret(kind, location)
    if problem in ("extra_forbidden", "invalid_key"):
        # Whoever misspells a key may have meant a secret one.
        names[-1] = told_key(names[-1]) if problem == "extra_forbidden" else ""
        hidden = True
    hidden = hidden or (isinstance(value, str) and "@" in value)  # perhaps a URL's password stands before it
    name = ".".join(filter(None, names))
    if name and not hidden and isinstance(value, str | int | float | None):  # sections may hold anything, misplaced
        name += f" = {value!r}"
    return f"{name}: " if name else ""


def told_key(key: str) -> str:
    """What can be told of a key: without a blank `token:secret` is one to YAML."""
    return re.sub(r"(?s)[^\w-].*", "", key)


def _may_hold_secret(kind: type[BaseModel], location: Sequence[str]) -> bool:
    kinds: list[Any] = [kind]
    for part in location:
        models = [model for each in kinds for model in _models(each)]
        kinds = [model.model_fields[part].annotation for model in models if part in model.model_fields] or kinds
    return any(map(_holds_secret, kinds))


def _holds_secret(kind: Any) -> bool:
    if isinstance(kind, type) and issubclass(kind, (Secret, SecretStr, SecretBytes)):
        return True
    fields = [field.annotation for model in _models(kind) for field in model.model_fields.values()]
    return any(map(_holds_secret, [*fields, *get_args(kind)]))


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    """The models in a type, such as that of a list of them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for each in get_args(kind):
        yield from _models(each)
