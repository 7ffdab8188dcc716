"""Who calls, and whether he may: the one place where a key is checked, for both protocols."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from openbook.cache.redis import connect
from openbook.config import AccessSettings, Limits, Settings
from openbook.errors import InvalidConfig, KeysUnavailable, PermissionDenied, Unauthenticated
from openbook.serving.access.counters import TIMEOUT_S, Counters
from openbook.serving.access.keys import Identity, digest_of, identity_of
from openbook.serving.access.needs import need_of
from openbook.serving.access.ports import KeyBook, KeyStore
from openbook.serving.access.quotas import Quotas
from openbook.serving.access.scopes import Scope
from openbook.telemetry import refused

if TYPE_CHECKING:
    from openbook.serving.access.oidc import Tokens

HOW = (
    "send a key as `Authorization: Bearer ob_...` or as `x-api-key`; openbook's own commands take it from "
    "OPENBOOK_API_KEY"
)


class Gate:
    """Lets in who has a key, or a token, with the scope that his call needs.

    Args:
        keys: where they are looked up; none, if there are tokens alone.
        default: limits that a key leaves open.
        quotas: what callers have asked for; by itself, if not given.
        tokens: of an OpenID provider, if it has one.
    """

    def __init__(
        self, keys: KeyStore | None, default: Limits, quotas: Quotas | None = None, tokens: "Tokens | None" = None
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self._default = default
        self.quotas = quotas or Quotas(None)

    async def ask_early(self) -> None:
        """Ask for what the first callers would have to wait for."""
        if self._tokens:
            await self._tokens.ask_early()

    async def admit(self, path: str, headers: Mapping[str, str | bytes]) -> Identity | None:
        """Who calls this path, HTTP's or gRPC's; None where nobody needs a key.

        Raises:
            Unauthenticated: no key, or one that is wrong, expired or revoked.
            PermissionDenied: the key does not have the scope.
            KeysUnavailable: the key cannot be looked up.
        """
        need = need_of(path)
        if need is None:
            return None
        try:
            identity = await self._identify(credential(headers))
        except (Unauthenticated, KeysUnavailable) as error:
            refused("endpoint", "keys" if isinstance(error, KeysUnavailable) else "key").inc()
            raise
        # What is for admins tells of all tenants.
        if need not in identity.scopes or (need is Scope.ADMIN and identity.tenant):
            refused("endpoint", "scope").inc()
            of_all = ", of no tenant" if need is Scope.ADMIN else ""
            raise PermissionDenied(f"{path} needs the scope {need}{of_all}: {identity.caller} does not have it")
        self.quotas.open(identity)
        return identity

    async def aclose(self) -> None:
        """Close all connections."""
        if self._keys:
            await self._keys.aclose()
        await self.quotas.aclose()

    async def _identify(self, text: str) -> Identity:
        if self._tokens and text.count(".") == 2:  # no key has a dot
            return await self._tokens.identify(text)
        digest = digest_of(text)
        record = await self._keys.find(digest) if self._keys and digest else None
        if record is None:
            raise Unauthenticated(f"the key is none of ours: {HOW}")
        if why := record.why_dead(time.time()):
            raise Unauthenticated(f"the key ob_{record.prefix}_... has {'been ' if why == 'revoked' else ''}{why}")
        return identity_of(record, self._default)


def credential(headers: Mapping[str, str | bytes]) -> str:
    """What a caller shows of himself.

    Raises:
        Unauthenticated: nothing, two different things, or something of another kind.
    """
    sent, own = (str(headers.get(name, "")) for name in ("authorization", "x-api-key"))
    kind, _, token = sent.partition(" ")
    token = token.strip()
    if sent and (kind.lower() != "bearer" or not token):
        raise Unauthenticated(f"authorization must be of the kind Bearer: {HOW}")
    if own and token and own != token:
        raise Unauthenticated("authorization and x-api-key must not differ")
    if not (own or token):
        raise Unauthenticated(f"a key is needed: {HOW}")
    return own or token


def open_gate(settings: Settings) -> Gate | None:
    """The gate that the settings name; None where nobody needs a key.

    Raises:
        InvalidConfig: the file of keys is not there, the URL is none of a Redis, or pyjwt is not installed.
    """
    access = settings.access
    if not access.is_guarded:
        return None
    return Gate(_open_store(access), access.limits, Quotas(_open_counters(settings)), _open_tokens(access))


def _open_tokens(access: AccessSettings) -> "Tokens | None":
    if access.oidc is None:
        return None
    try:
        from openbook.serving.access.oidc import Tokens
    except ModuleNotFoundError as error:
        raise InvalidConfig(f"access.oidc needs {error.name}: pip install 'openbook[oidc]'") from None
    return Tokens(access.oidc, access.limits)


def _open_store(access: AccessSettings) -> KeyStore | None:
    if access.keys == "none":
        return None
    if access.keys == "redis":
        from openbook.serving.access.key_redis import KeyRedis

        return KeyRedis(access)
    from openbook.serving.access.key_file import KeyFile

    assert access.path is not None
    return KeyFile(access.path, access.known_for_s)


def _open_counters(settings: Settings) -> Counters | None:
    """In the Redis of the keys, else in that of the cache."""
    name, section = ("access", settings.access) if settings.access.url else ("cache", settings.cache)
    if section.url is None:
        return None
    return Counters(connect(name, section.url, section.tls, TIMEOUT_S))


def open_book(settings: AccessSettings) -> KeyBook:
    """The keys that the settings name, for whoever hands them out. Raises InvalidConfig as `open_gate`."""
    match settings.keys:
        case "file":
            from openbook.serving.access.key_file import KeyFileBook

            assert settings.path is not None
            return KeyFileBook(settings.path)
        case "redis":
            from openbook.serving.access.key_redis import KeyRedisBook

            return KeyRedisBook(settings)
        case _:
            raise InvalidConfig("access.keys must say where keys are kept, file or redis; or name a file with --file")
