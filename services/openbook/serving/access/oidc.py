"""Bearer tokens of an OpenID provider: who they say calls, once the provider's keys say that they are its own.

The provider is asked for its keys, never about a token: one is good until it expires, and can not be revoked here.
"""

import asyncio
import hashlib
import json
import logging
import re
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from openbook.config import Limits, OidcSettings
from openbook.core.context import is_harmless
from openbook.core.deadline import Clock
from openbook.errors import KeysUnavailable, Unauthenticated
from openbook.serving.access.keys import NAME, Identity, caller_name
from openbook.serving.access.scopes import Scope

log = logging.getLogger(__name__)

MAX_CHARS = 16_384
LEEWAY_S = 30.0
"""For clocks that differ."""
REFRESH_S = 600.0
"""How old the provider's keys may be before it is asked again."""
AT_MOST_EVERY_S = 30.0
"""However many tokens name keys that we do not know."""
KNOWN_FOR_S = 86_400.0
"""How long its keys count while it does not answer."""
PATIENCE_S = 1.0
"""How long a caller waits for the provider: he has a place meanwhile, which others want."""
TIMEOUT_S = 3.0
N_TRIES = 3
MAX_BYTES = 1 << 20
MAX_SUBJECT_CHARS = 64

_Key = jwt.PyJWK | RSAPublicKey
"""Bound to one algorithm, or good for each of RSA's that the settings allow."""


class Tokens:
    """Whom a provider's tokens name. For one event loop."""

    def __init__(self, settings: OidcSettings, limits: Limits, clock: Clock = time.monotonic) -> None:
        self._settings = settings
        self._limits = limits
        self._clock = clock
        self._keys: dict[str | None, list[_Key]] = {}
        self._fetched_at = self._asked_at = -float("inf")
        self._fetching: asyncio.Task[None] | None = None

    async def ask_early(self) -> None:
        """Ask the provider for its keys, and wait for nothing: what it says counts for those who come then."""
        self._refresh(is_old=True)
        self._asked_at -= AT_MOST_EVERY_S  # it does not count: where it fails, the first caller asks again
        await asyncio.sleep(0)  # it is asked in a thread from now on, even if the event loop is held up

    async def identify(self, token: str) -> Identity:
        """Who has this token.

        Raises:
            Unauthenticated: it is none of the provider's for us, or has expired.
            KeysUnavailable: the provider does not say which keys are its own.
        """
        try:
            if len(token) > MAX_CHARS:
                raise jwt.InvalidTokenError("too long")
            kid = jwt.get_unverified_header(token).get("kid")
            *others, last = await self._keys_of(kid)
            for key in others:
                with suppress(jwt.InvalidSignatureError, jwt.InvalidAlgorithmError, jwt.InvalidKeyError, TypeError):
                    return self._identity(self._claims(token, key))
            claims = self._claims(token, last)
        except (Unauthenticated, KeysUnavailable):
            raise
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("the token has expired") from None
        except Exception as error:  # whatever a forger thinks of
            raise Unauthenticated(
                f"the token is none of {self._settings.issuer} for us: {type(error).__name__}"
            ) from None
        return self._identity(claims)

    def _claims(self, token: str, key: _Key) -> Mapping[str, Any]:
        settings = self._settings
        claims: Mapping[str, Any] = jwt.decode(
            token,
            key,
            algorithms=list(settings.algorithms),
            audience=settings.audience,
            issuer=settings.issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud", settings.caller_claim]},
        )
        return claims

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        settings, tenant = self._settings, ""
        if settings.tenant_claim:
            tenant = claims.get(settings.tenant_claim, "")
            if not isinstance(tenant, str) or not re.fullmatch(NAME, tenant):
                raise Unauthenticated(f"the token's claim {settings.tenant_claim} must name a tenant: {NAME}")
        subject = str(claims[settings.caller_claim])
        if not subject or len(subject) > MAX_SUBJECT_CHARS or not is_harmless(subject):
            subject = hashlib.sha256(subject.encode(errors="backslashreplace")).hexdigest()
        given = claims.get(settings.scopes_claim, ())
        names = given.split() if isinstance(given, str) else given if isinstance(given, list) else ()
        known = [name for name in names if isinstance(name, str) and name in settings.scopes]
        scopes = frozenset(Scope(settings.scopes[name]) for name in known)
        # No key has a colon in its holder's name.
        return Identity(caller_name(tenant, f"oidc:{subject}"), tenant, scopes, self._limits)

    async def _keys_of(self, kid: str | None) -> list[_Key]:
        keys = self._known(kid)
        self._refresh(is_old=not keys or self._age_s > REFRESH_S)
        if not keys and self._fetching:  # who is known waits for nobody
            await asyncio.wait({self._fetching}, timeout=PATIENCE_S)
            keys = self._known(kid)
        if not keys and self._asked_at > self._fetched_at:  # it may have keys that we do not know
            raise KeysUnavailable("the provider of tokens does not say which keys are its own: try again later")
        if not keys:
            raise Unauthenticated("the token is signed by a key that its provider does not have")
        return keys

    @property
    def _age_s(self) -> float:
        """Of the keys."""
        return self._clock() - self._fetched_at

    def _known(self, kid: str | None) -> list[_Key]:
        """A token that names no key is of one without a name, or of the only one there is."""
        if self._age_s > KNOWN_FOR_S:
            return []
        return next(iter(self._keys.values())) if kid is None and len(self._keys) == 1 else self._keys.get(kid, [])

    def _refresh(self, is_old: bool) -> None:
        if self._fetching and self._fetching.done():
            self._fetching = None
        if is_old and not self._fetching and self._clock() - self._asked_at > AT_MOST_EVERY_S:
            self._asked_at = self._clock()
            self._fetching = asyncio.create_task(self._fetch())

    async def _fetch(self) -> None:
        try:
            found = await asyncio.to_thread(fetch_keys, self._settings)
            keys = usable_keys(found)
        except Exception as error:
            log.warning("%s does not tell its keys: %s: %s", self._settings.issuer, type(error).__name__, error)
            return
        self._keys = keys
        self._fetched_at = self._clock()


def usable_keys(found: dict[str, Any]) -> dict[str | None, list[_Key]]:
    """Those of a provider that sign, by their names.

    Raises:
        jwt.PyJWTError: there are none.
    """
    keys = [each for each in jwt.PyJWKSet.from_dict(found).keys if each.public_key_use in (None, "sig")]
    bound = {each.get("kid") for each in found["keys"] if isinstance(each, dict) and each.get("alg")}
    # An RSA key that names no algorithm does for six, and pyjwt would bind it to RS256. Other kinds have one each.
    usable: dict[str | None, list[_Key]] = {}
    for each in keys:
        is_bound = each.key_type != "RSA" or each.key_id in bound
        usable.setdefault(each.key_id, []).append(each if is_bound else each.key)
    return usable


def fetch_keys(settings: OidcSettings) -> dict[str, Any]:
    """The provider's keys, as it publishes them.

    Raises:
        OSError, HTTPException, ValueError: it does not answer, or not with such.
    """
    url = settings.jwks_url
    if url is None:
        about = _fetch(f"{settings.issuer.rstrip('/')}/.well-known/openid-configuration")
        if about.get("issuer") != settings.issuer:
            raise ValueError(f"its configuration is that of {about.get('issuer')!a}")
        url = str(about.get("jwks_uri"))
        if not url.startswith("https://") and not settings.issuer.startswith("http://"):
            raise ValueError(f"its keys must be at https://, got {url!a}")
    return _fetch(url)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *asked: Any) -> None:
        """To nowhere: keys come from where the settings say."""


def _fetch(url: str) -> dict[str, Any]:
    opener = urllib.request.build_opener(_NoRedirects)
    again = Retrying(
        retry=retry_if_exception_type((OSError, HTTPException)),
        stop=stop_after_attempt(N_TRIES),
        wait=wait_exponential(0.1),
        reraise=True,
    )

    def once() -> bytes:
        try:
            with opener.open(url, timeout=TIMEOUT_S) as reply:
                body: bytes = reply.read(MAX_BYTES)
                return body
        except HTTPError as error:
            error.close()  # it holds the connection
            raise

    found = json.loads(again(once))
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found
