"""API keys: how they look, what is kept of them, and which of them are alive. No I/O.

A key is `ob_<prefix>_<secret>`. Kept is the SHA-256 of all of it, which is enough: slow hashes protect passwords, which
people choose and others guess. Of 256 random bits nobody guesses any, however fast he can try. A key is found by its
hash, so the time that looking takes tells of the hash alone, and nothing of a key that is almost right.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openbook.config import Limits
from openbook.core.fingerprint import text_digest
from openbook.errors import InvalidRequest
from openbook.serving.access.scopes import Scope

KEY = re.compile(r"ob_([0-9a-f]{8})_[0-9a-f]{64}")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$"
"""Of a key, and of a tenant: it stands in logs, in headers, and in keys of caches between colons."""
MAX_ALIVE = 2
"""Keys of one name, so that a new one can be handed out before the old one is revoked."""
LATEST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
"""No day can be told that is later."""


class KeyRecord(BaseModel):
    """What is kept of a key. Times are seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # of the whole key
    name: Annotated[str, Field(pattern=NAME)]
    tenant: Annotated[str, Field(pattern=rf"{NAME}|^$")] = ""
    scopes: tuple[Scope, ...]
    created: float
    expires: float | None = None
    revoked: float | None = None
    limits: Limits = Limits()

    def why_dead(self, now: float) -> str:
        """Why it lets nobody in; empty while it does."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now >= self.expires else ""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who calls, once he is known."""

    caller: str  # tenant and name
    tenant: str
    scopes: frozenset[Scope]
    limits: Limits


def identity_of(record: KeyRecord, default: Limits) -> Identity:
    """The holder of a key: all keys of one tenant and name are one caller. Limits that the key leaves open are the
    default ones.
    """
    own = record.limits.model_dump(exclude_none=True)
    return Identity(
        caller_name(record.tenant, record.name),
        record.tenant,
        frozenset(record.scopes),
        default.model_copy(update=own),
    )


def caller_name(tenant: str, name: str) -> str:
    """What queues, quotas and logs call a caller."""
    return f"{tenant}/{name}" if tenant else name


def mint(
    name: str,
    now: float,
    scopes: Iterable[Scope],
    tenant: str = "",
    expires: float | None = None,
    limits: Limits | None = None,
) -> tuple[str, KeyRecord]:
    """A new key and what to keep of it. The key itself is nowhere else.

    Raises:
        InvalidRequest: name or tenant is none, there is no scope, a tenant's key would have `admin`, it would be born
            expired, or would outlive the year 9999.
    """
    chosen = tuple(sorted(set(scopes)))
    if not chosen:
        raise InvalidRequest(f"scopes must be some of {', '.join(Scope)}, got none")
    if tenant and Scope.ADMIN in chosen:
        raise InvalidRequest(f"the scope admin tells of all tenants: a key of tenant {tenant!r} cannot have it")
    if expires is not None and not expires > now:
        raise InvalidRequest("a key must expire later than now")
    if expires is not None and expires > LATEST:
        raise InvalidRequest("a key must expire by the end of the year 9999: give it no days, and it never does")
    key = f"ob_{secrets.token_hex(4)}_{secrets.token_hex(32)}"
    prefix, digest = key.split("_")[1], text_digest(key)
    try:
        record = KeyRecord(
            prefix=prefix,
            digest=digest,
            name=name,
            tenant=tenant,
            scopes=chosen,
            created=now,
            expires=expires,
            limits=limits or Limits(),
        )
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc']))} = {each['input']!r}: {each['msg']}" for each in error.errors())
        raise InvalidRequest("; ".join(problems)) from None
    return key, record


def digest_of(key: str) -> str | None:
    """By which a key is found; None for what does not look like one."""
    return text_digest(key) if KEY.fullmatch(key) else None


def may_join(records: Sequence[KeyRecord], new: KeyRecord, now: float) -> KeyRecord:
    """The new one, if it may be alive beside these.

    Raises:
        InvalidRequest: there are two of its name already, or one has its prefix.
    """
    alive = [each for each in records if (each.tenant, each.name) == (new.tenant, new.name) and not each.why_dead(now)]
    if len(alive) >= MAX_ALIVE:
        prefixes = ", ".join(each.prefix for each in alive)
        who = caller_name(new.tenant, new.name)
        raise InvalidRequest(f"{who} may have {MAX_ALIVE} keys at once, and has {prefixes}: revoke one first")
    if any(each.prefix == new.prefix for each in records):
        raise InvalidRequest(f"there is a key with the prefix {new.prefix} already: try again")
    return new


def revoked(records: Sequence[KeyRecord], prefix: str, now: float) -> KeyRecord:
    """The key with this prefix, or of which this is all or the beginning, as it is to be kept from now on.

    Raises:
        InvalidRequest: there is no such key.
    """
    short = prefix.removeprefix("ob_").split("_")[0]
    for record in records:
        if record.prefix == short:
            return record if record.revoked is not None else record.model_copy(update={"revoked": now})
    raise InvalidRequest(f"no key has the prefix {short[:8]!r}")


def to_line(record: KeyRecord) -> str:
    """As JSON, without what is open."""
    return record.model_dump_json(exclude_none=True)


def from_line(line: str | bytes) -> KeyRecord:
    """What `to_line` wrote. Raises ValueError for anything else, without what stands there."""
    try:
        return KeyRecord.model_validate_json(line)
    except ValidationError:
        raise ValueError("no key") from None
