"""Who calls, and whether he may: the one place where a key is checked, for both protocols."""

import time
from collections.abc import Mapping

from openbook.config import AccessSettings, Limits
from openbook.errors import InvalidConfig, KeysUnavailable, PermissionDenied, Unauthenticated
from openbook.serving.access.keys import Identity, digest_of, identity_of
from openbook.serving.access.needs import need_of
from openbook.serving.access.ports import KeyBook, KeyStore
from openbook.telemetry import refused

HOW = "send a key as `Authorization: Bearer ob_...` or as `x-api-key`"


class Gate:
    """Lets in who has a key with the scope that his call needs."""

    def __init__(self, keys: KeyStore, default: Limits) -> None:
        self._keys = keys
        self._default = default

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
        except (Unauthenticated, KeysUnavailable):
            refused("endpoint", "key").inc()
            raise
        if need not in identity.scopes:
            refused("endpoint", "scope").inc()
            raise PermissionDenied(f"{path} needs the scope {need}, and the key of {identity.caller} does not have it")
        return identity

    async def aclose(self) -> None:
        """Close all connections."""
        await self._keys.aclose()

    async def _identify(self, text: str) -> Identity:
        digest = digest_of(text)
        record = await self._keys.find(digest) if digest else None
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


def open_gate(settings: AccessSettings) -> Gate | None:
    """The gate that the settings name; None where nobody needs a key.

    Raises:
        InvalidConfig: the file of keys is not there, or the URL is none of a Redis.
    """
    store: KeyStore
    match settings.keys:
        case "none":
            return None
        case "file":
            from openbook.serving.access.key_file import KeyFile

            assert settings.path is not None
            store = KeyFile(settings.path, settings.known_for_s)
        case "redis":
            from openbook.serving.access.key_redis import KeyRedis

            store = KeyRedis(settings)
    return Gate(store, settings.limits)


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
