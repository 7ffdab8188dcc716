"""Tokens of an OpenID provider, which really answers; and whatever a forger may make of them."""

import asyncio
import base64
import http.server
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi import FastAPI

from openbook.config import Limits, OidcSettings, parse
from openbook.errors import InvalidConfig, InvalidModel, KeysUnavailable, Unauthenticated
from openbook.serving.access import key_file, oidc
from openbook.serving.access.gate import Gate, open_gate
from openbook.serving.access.key_file import KeyFileBook
from openbook.serving.access.keys import Identity, mint
from openbook.serving.access.oidc import AT_MOST_EVERY_S, KNOWN_FOR_S, REFRESH_S, Tokens, fetch_keys
from openbook.serving.access.scopes import Scope
from openbook.serving.app import Ingress
from openbook.serving.endpoint.guard import Guarded
from openbook.testing import ManualClock

AUDIENCE = "openbook"


class Provider:
    """Publishes its configuration and its keys."""

    def __init__(self) -> None:
        self.signers: dict[str, Any] = {"one": ec.generate_private_key(ec.SECP256R1())}
        self.of_keys: dict[str, str] = {}  # what else their descriptions say
        self.n_asked = 0
        self.is_asked = threading.Event()
        self.is_well = True
        self.n_failing = 0  # so many answers that come next do
        self.may_answer = threading.Event()
        self.may_answer.set()
        provider = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.is_asked.set()
                provider.may_answer.wait()
                provider.n_asked += self.path == "/keys"
                pages = {"/.well-known/openid-configuration": provider.about(), "/keys": provider.keys()}
                body = json.dumps(pages.get(self.path, {})).encode()
                is_well = provider.is_well and not provider.n_failing
                provider.n_failing -= provider.n_failing > 0
                self.send_response(302 if self.path == "/moved" else 200 if is_well else 503)
                self.send_header("Location", f"{provider.url}/keys")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *anything: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.issuer = self.url

    def about(self) -> dict[str, str]:
        return {"issuer": self.issuer, "jwks_uri": f"{self.url}/keys"}

    def keys(self) -> dict[str, Any]:
        keys = []
        for kid, key in self.signers.items():
            kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
            said = json.loads(kind.to_jwk(key.public_key()))
            keys.append({**said, "kid": kid, "use": "sig", **self.of_keys})
        return {"keys": keys}

    def claims(self) -> dict[str, Any]:
        due = time.time() + 600
        return {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "exp": due, "scope": "openid openbook:ask"}

    def token(self, kid: str = "one", *, key: Any = None, algorithm: str = "ES256", **changes: Any) -> str:
        claims = {name: value for name, value in {**self.claims(), **changes}.items() if value is not None}
        return jwt.encode(claims, key or self.signers[kid], algorithm, headers={"kid": kid})


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    monkeypatch.setattr(oidc, "PATIENCE_S", 60.0)  # this machine may be busy
    found = Provider()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.may_answer.set()
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def settings(provider: Provider, **changes: Any) -> OidcSettings:
    return OidcSettings(issuer=provider.url, audience=AUDIENCE, **changes)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


def identified(provider: Provider, token: str, **changes: Any) -> Identity:
    return asyncio.run(Tokens(settings(provider, **changes), Limits(tokens_per_day=7)).identify(token))


def test_a_token_says_who_calls_and_what_he_may(provider: Provider) -> None:
    ann = identified(provider, provider.token())
    assert ann == Identity("oidc:ann", "", frozenset([Scope.ASK]), Limits(tokens_per_day=7))
    token = provider.token(roles=["reader", "boss"], org="acme", scope=None)
    mapped = {"scopes_claim": "roles", "scopes": {"reader": "retrieve", "boss": "admin"}, "tenant_claim": "org"}
    assert identified(provider, token, **mapped) == Identity(
        "acme/oidc:ann", "acme", frozenset([Scope.RETRIEVE, Scope.ADMIN]), Limits(tokens_per_day=7)
    )
    assert identified(provider, provider.token(scope=7)).scopes == frozenset()
    listed = provider.token(scope=[{"openbook:ask": 1}, ["openbook:ask"], 7, "openbook:retrieve"])
    assert identified(provider, listed).scopes == {Scope.RETRIEVE}
    by_mail = provider.token(email="ann@example.org", sub=None)
    assert identified(provider, by_mail, caller_claim="email").caller == "oidc:ann@example.org"
    with pytest.raises(Unauthenticated, match="MissingRequiredClaim"):
        identified(provider, provider.token(), caller_claim="email")


def test_clocks_may_differ_a_little(provider: Provider) -> None:
    assert identified(provider, provider.token(exp=time.time() - 10)).caller == "oidc:ann"


def test_a_subject_that_would_break_a_log_is_known_by_its_digest(provider: Provider) -> None:
    subjects = ("a\nb", "é", "x" * 200, "x" * 201, "\ud800", "")
    callers = {identified(provider, provider.token(sub=sub)).caller for sub in subjects}
    assert len(callers - {"oidc:"}) == 6
    assert all(len(caller) < 128 and caller.isascii() and caller.isprintable() for caller in callers)


def unsigned(provider: Provider) -> str:
    return jwt.encode(provider.claims(), "", "none", headers={"kid": "one"})


def by_the_public_key(provider: Provider) -> str:
    """The confusion of old: the public key taken for a secret."""
    public = provider.signers["one"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head = {"alg": "HS256", "typ": "JWT", "kid": "one"}
    parts = [base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=") for each in (head, provider.claims())]
    signature = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(b".".join(parts), public)
    return b".".join([*parts, base64.urlsafe_b64encode(signature).rstrip(b"=")]).decode()


WRONG: dict[str, Callable[[Provider], str]] = {
    "expired": lambda it: it.token(exp=time.time() - 60),
    "not yet": lambda it: it.token(nbf=time.time() + 600),
    "for ever": lambda it: it.token(exp=None),
    "for another": lambda it: it.token(aud="somebody"),
    "for nobody": lambda it: it.token(aud=None),
    "of another": lambda it: it.token(iss="https://example.org"),
    "of nobody": lambda it: it.token(iss=None),
    "about nobody": lambda it: it.token(sub=None),
    "about a list": lambda it: it.token(sub=["ann"]),
    "forged": lambda it: it.token(key=ec.generate_private_key(ec.SECP256R1())),
    "by another kind": lambda it: it.token(key=rsa.generate_private_key(65537, 2048), algorithm="RS256"),
    "not allowed": lambda it: it.token(key=ec.generate_private_key(ec.SECP521R1()), algorithm="ES512"),
    "by a key that is not there": lambda it: it.token("two", key=ec.generate_private_key(ec.SECP256R1())),
    "unsigned": unsigned,
    "by the public key": by_the_public_key,
    "altered": lambda it: it.token()[:-8] + "AAAAAAAA",
    "dots": lambda it: "..",
    "noise": lambda it: "a.b.c",
    "deep": lambda it: base64.urlsafe_b64encode(b"[" * 9000).decode() + ".a.b",
    "long": lambda it: it.token(more="x" * 20_000),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_no_other_token_lets_anybody_in(wrong: str, provider: Provider) -> None:
    token = WRONG[wrong](provider)
    with pytest.raises(Unauthenticated) as refused:
        identified(provider, token)
    assert not any(len(part) > 8 and part in str(refused.value) for part in token.split(".")), str(refused.value)


OF_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")


def test_an_rsa_key_that_names_no_algorithm_does_for_those_allowed_and_for_no_other(provider: Provider) -> None:
    provider.signers["one"] = rsa.generate_private_key(65537, 2048)
    for allowed in OF_RSA:
        for algorithm in OF_RSA:
            token = provider.token(algorithm=algorithm)
            if algorithm == allowed:
                assert identified(provider, token, algorithms=(allowed,)).caller == "oidc:ann"
            else:
                with pytest.raises(Unauthenticated, match="InvalidAlgorithmError"):
                    identified(provider, token, algorithms=(allowed,))
    for forged in (by_the_public_key(provider), unsigned(provider)):
        with pytest.raises(Unauthenticated, match="InvalidAlgorithmError"):
            identified(provider, forged, algorithms=OF_RSA)
    other = rsa.generate_private_key(65537, 2048)
    with pytest.raises(Unauthenticated, match="InvalidSignatureError"):
        identified(provider, provider.token(key=other, algorithm="PS256"), algorithms=OF_RSA)


def test_an_rsa_key_that_names_its_algorithm_does_for_it_alone(provider: Provider) -> None:
    provider.signers["one"] = rsa.generate_private_key(65537, 2048)
    provider.of_keys = {"alg": "PS384"}
    assert identified(provider, provider.token(algorithm="PS384"), algorithms=OF_RSA).caller == "oidc:ann"
    with pytest.raises(Unauthenticated, match="InvalidAlgorithmError"):
        identified(provider, provider.token(algorithm="RS256"), algorithms=OF_RSA)


def test_of_keys_without_a_name_each_is_tried(provider: Provider) -> None:
    provider.signers["two"] = rsa.generate_private_key(65537, 2048)
    provider.signers["three"] = ec.generate_private_key(ec.SECP256R1())
    provider.of_keys = {"kid": None}
    allowed = ("ES256", "RS256")

    def token(key: Any, **changes: Any) -> str:
        algorithm = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
        return jwt.encode({**provider.claims(), **changes}, key, algorithm)

    for key in provider.signers.values():
        assert identified(provider, token(key), algorithms=allowed).caller == "oidc:ann"
        with pytest.raises(Unauthenticated, match="expired"):
            identified(provider, token(key, exp=1), algorithms=allowed)
    with pytest.raises(Unauthenticated, match="InvalidSignatureError"):
        identified(provider, token(ec.generate_private_key(ec.SECP256R1())), algorithms=allowed)


def test_a_token_that_names_no_key_is_of_the_only_one(provider: Provider) -> None:
    token = jwt.encode(provider.claims(), provider.signers["one"], "ES256")
    assert identified(provider, token).caller == "oidc:ann"
    provider.signers["two"] = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(Unauthenticated, match="a key that its provider does not have"):
        identified(provider, token)


def test_a_key_that_is_not_for_signing_signs_nothing(provider: Provider) -> None:
    provider.of_keys = {"use": None}
    assert identified(provider, provider.token()).caller == "oidc:ann"
    provider.of_keys = {"use": "enc"}
    with pytest.raises(Unauthenticated, match="a key that its provider does not have"):
        identified(provider, provider.token())


def test_where_tenants_are_named_a_token_without_one_is_refused(provider: Provider) -> None:
    for org in (None, "", "a:b", "acme\n", ["acme"]):
        with pytest.raises(Unauthenticated, match="claim org must name a tenant"):
            identified(provider, provider.token(org=org), tenant_claim="org")


def test_new_keys_of_the_provider_are_found_and_it_is_not_asked_too_often(provider: Provider) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        tokens = Tokens(settings(provider), Limits(), clock)
        for _ in range(5):
            await tokens.identify(provider.token())
        assert provider.n_asked == 1
        provider.signers["two"] = ec.generate_private_key(ec.SECP256R1())
        clock.advance(AT_MOST_EVERY_S + 1)
        assert (await tokens.identify(provider.token("two"))).caller == "oidc:ann"
        for _ in range(5):
            with pytest.raises(Unauthenticated, match="a key that its provider does not have"):
                await tokens.identify(provider.token("three", key=provider.signers["one"]))
        assert provider.n_asked == 2

    run(scenario)


def test_a_key_that_the_provider_withdraws_lets_nobody_in_ten_minutes_later(provider: Provider) -> None:
    async def scenario() -> None:
        clock, old = ManualClock(), provider.token()
        tokens = Tokens(settings(provider), Limits(), clock)
        await tokens.identify(old)
        clock.advance(AT_MOST_EVERY_S + 1)
        await tokens.identify(old)
        assert tokens._fetching is None, "its keys are not old yet"
        provider.signers = {"two": ec.generate_private_key(ec.SECP256R1())}
        clock.advance(REFRESH_S)
        await tokens.identify(old)  # who is known waits for nobody
        assert tokens._fetching
        await tokens._fetching
        with pytest.raises(Unauthenticated, match="a key that its provider does not have"):
            await tokens.identify(old)
        await tokens.identify(provider.token("two"))

    run(scenario)


def test_without_its_provider_known_keys_count_for_a_day_and_nobody_is_let_in_unknown(
    provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        provider.is_well = False
        tokens = Tokens(settings(provider), Limits(), clock)
        with pytest.raises(KeysUnavailable):
            await tokens.identify(provider.token())
        assert f"{provider.url} does not tell its keys: HTTPError: HTTP Error 503" in caplog.text
        provider.is_well, provider.n_failing = True, 1
        clock.advance(AT_MOST_EVERY_S + 1)
        await tokens.identify(provider.token())
        provider.is_well = False
        for later in (REFRESH_S + 1, KNOWN_FOR_S - REFRESH_S - 2):
            clock.advance(later)
            await tokens.identify(provider.token())
        clock.advance(2)
        with pytest.raises(KeysUnavailable):
            await tokens.identify(provider.token())

    run(scenario)


def test_whoever_comes_first_after_a_day_is_let_in(provider: Provider) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        tokens = Tokens(settings(provider), Limits(), clock)
        await tokens.identify(provider.token())
        clock.advance(KNOWN_FOR_S + 1)
        await asyncio.gather(*(tokens.identify(provider.token()) for _ in range(3)))
        assert provider.n_asked == 2

    run(scenario)


def test_while_its_provider_fails_a_token_by_a_new_key_is_neither_let_in_nor_called_wrong(provider: Provider) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        tokens = Tokens(settings(provider), Limits(), clock)
        await tokens.identify(provider.token())
        provider.signers["two"] = ec.generate_private_key(ec.SECP256R1())
        provider.is_well = False
        clock.advance(AT_MOST_EVERY_S + 1)
        for _ in range(2):
            with pytest.raises(KeysUnavailable):
                await tokens.identify(provider.token("two"))
        await tokens.identify(provider.token())
        provider.is_well = True
        clock.advance(AT_MOST_EVERY_S + 1)
        await tokens.identify(provider.token("two"))

    run(scenario)


def test_while_its_provider_hangs_nobody_waits_for_it_and_what_it_says_in_the_end_counts(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        tokens = Tokens(settings(provider), Limits())
        provider.may_answer.clear()
        with monkeypatch.context() as hurried:
            hurried.setattr(oidc, "PATIENCE_S", 0.0)
            with pytest.raises(KeysUnavailable):
                await tokens.identify(provider.token())
        provider.may_answer.set()
        assert (await tokens.identify(provider.token())).caller == "oidc:ann"
        assert provider.n_asked == 1

    run(scenario)


def test_who_comes_first_does_not_wait_for_a_provider_that_was_asked_before(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "PATIENCE_S", 0.0)

    async def scenario() -> None:
        tokens = Tokens(settings(provider), Limits())
        provider.may_answer.clear()
        await tokens.ask_early()
        provider.may_answer.set()
        assert tokens._fetching
        await tokens._fetching
        assert (await tokens.identify(provider.token())).caller == "oidc:ann"
        assert provider.n_asked == 1

    run(scenario)


def test_a_provider_that_does_not_answer_before_the_first_caller_is_asked_again_for_him(provider: Provider) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        tokens = Tokens(settings(provider), Limits(), clock)
        provider.is_well = False
        await tokens.ask_early()
        assert tokens._fetching
        await tokens._fetching
        provider.is_well = True
        clock.advance(5)
        assert (await tokens.identify(provider.token())).caller == "oidc:ann"

    run(scenario)


def test_a_replica_asks_its_provider_before_its_models_load(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who loads them holds its event loop up."""
    for name in ("setup_logging", "setup_tracing", "MetricsServer"):
        monkeypatch.setattr(f"openbook.serving.app.{name}", lambda *_: None)

    def load(_: object) -> Any:
        raise InvalidModel("asked" if provider.is_asked.wait(30) else "not asked")

    async def scenario() -> None:
        replica: Any = Ingress.__new__(Ingress)
        access = {"oidc": {"issuer": provider.url, "audience": AUDIENCE}}
        with pytest.raises(InvalidModel, match=r"^asked"):
            await replica.__init__(parse({"access": access}), load, load)

    run(scenario)


def test_a_configuration_of_another_issuer_is_none(provider: Provider) -> None:
    provider.issuer = "https://example.org"
    with pytest.raises(KeysUnavailable):
        identified(provider, provider.token())
    assert identified(provider, provider.token(), jwks_url=f"{provider.url}/keys").caller == "oidc:ann"


def test_keys_come_only_from_where_they_must(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "N_TRIES", 1)
    with pytest.raises(OSError, match="302"):
        fetch_keys(settings(provider, jwks_url=f"{provider.url}/moved"))
    asked: list[str] = []

    def about(url: str) -> dict[str, str]:
        asked.append(url)
        return {"issuer": "https://example.org/", "jwks_uri": "http://example.org/keys"}

    monkeypatch.setattr(oidc, "_fetch", about)
    with pytest.raises(ValueError, match="its keys must be at https"):
        fetch_keys(OidcSettings(issuer="https://example.org/", audience=AUDIENCE))
    assert asked == ["https://example.org/.well-known/openid-configuration"]


def test_a_provider_that_hangs_is_given_up(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "N_TRIES", 1)
    monkeypatch.setattr(oidc, "TIMEOUT_S", 0.1)
    provider.may_answer.clear()
    at_last = threading.Timer(30, provider.may_answer.set)
    at_last.start()
    with pytest.raises(OSError, match="timed out"):
        fetch_keys(settings(provider))
    at_last.cancel()


def test_tokens_and_scopes_are_asked_for_at_the_gate(provider: Provider) -> None:
    access = {"oidc": {"issuer": provider.url, "audience": AUDIENCE}}
    gate = open_gate(parse({"access": access}))
    assert gate is not None
    app = FastAPI()
    app.add_middleware(Guarded, gate=gate)
    app.add_api_route("/v1/answer", lambda: "in", methods=["POST"])

    async def statuses(gate: Gate, *tokens: str) -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            headers = [{"authorization": f"Bearer {token}"} for token in tokens]
            return [(await client.post("/v1/answer", headers=each)).status_code for each in headers]

    tokens = (provider.token(), provider.token(scope="openid"), provider.token(exp=1), "ob_00000000_0", "")
    assert asyncio.run(statuses(gate, *tokens)) == [200, 403, 401, 401, 401]


def test_keys_and_tokens_get_in_side_by_side_under_the_limits_of_the_settings(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, kept = mint("web", 0.0, [Scope.ASK])
    KeyFileBook(tmp_path / "keys").put(lambda _: kept)
    access = {
        "keys": "file",
        "path": str(tmp_path / "keys"),
        "limits": {"questions_per_day": 9},
        "url": "redis://ours:1/0",
        "oidc": {"issuer": provider.url, "audience": AUDIENCE},
    }
    gate = open_gate(parse({"access": access, "cache": {"url": "redis://cache:1/0"}}))
    assert gate is not None

    async def limits(*shown: str) -> dict[str, Limits]:
        found = [await gate.admit("/v1/answer", {"x-api-key": each}) for each in shown]
        return {each.caller: each.limits for each in found if each}

    nine = Limits(questions_per_day=9)
    assert asyncio.run(limits(key, provider.token())) == {"web": nine, "oidc:ann": nine}
    counters: Any = gate.quotas._shared
    assert counters._redis.connection_pool.connection_kwargs["host"] == "ours", "that of the cache forgets"
    monkeypatch.setattr(key_file, "LOOK_S", 0.0)
    (tmp_path / "keys").unlink()
    assert asyncio.run(limits(key)) == {"web": nine}, "known for a while"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"issuer": "http://example.org"}, "issuer"),
        ({"algorithms": ["HS256"]}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"algorithms": []}, "algorithms"),
        ({"scopes": {"x": "root"}}, "scopes"),
    ],
)
def test_settings_that_would_let_forgers_in_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"access\.oidc\.{message}"):
        parse({"access": {"oidc": {"issuer": "https://example.org", "audience": "a", **changes}}})
