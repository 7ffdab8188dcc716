"""Nobody gets past it without a key that will do: before a body is read, and before there is a place for a question."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openbook import wire
from openbook.core.context import Context
from openbook.errors import PermissionDenied
from openbook.logs import as_ours
from openbook.serving.access.gate import Gate
from openbook.serving.access.keys import Identity
from openbook.serving.endpoint.replies import error_reply, request_id_of

POLICY_VIOLATION = 1008
PORT = re.compile(r":\d*$")
NOBODYS = (".localhost", ".localdomain", ".local", ".internal", ".home.arpa")
"""Endings of names that nobody can register."""
ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|\[[0-9a-f:.]*\]")


class Guarded:
    """The application behind it, for those whom the gate admits; who they are is known to `identified`."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket: there is none, and who adds one has to open it here
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            return
        request = Request(scope)
        try:
            identity = await self._gate.admit(scope["path"], request.headers)
        except Exception as error:
            await error_reply(request, as_ours(error, request_id_of(request)))(scope, receive, send)
            return
        scope.setdefault("state", {})["identity"] = identity

        async def send_with_quota(message: Message) -> None:
            if identity and message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._gate.quotas.headers(identity))
            await send(message)

        await self._app(scope, receive, send_with_quota)


class OfThisMachine:
    """The application behind it, for who asks for it by address, by the name of a machine, or by one of these domains.

    Whoever sees a page of evil.example has its scripts ask evil.example, which may by then be the name of 127.0.0.1
    (DNS rebinding): they would read what is meant for this machine alone.
    """

    def __init__(self, app: ASGIApp, domains: Sequence[str]) -> None:
        self._app = app
        self._domains = frozenset(domains)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode(errors="replace")
            if not self._is_known(host):
                why = (
                    f"nobody needs a key here, and host {host[:100]!r} is no name of this machine or in serving.domains"
                )
                await error_reply(Request(scope), PermissionDenied(why))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if PORT.search(host) else host
        name = name.rstrip(".").lower()
        is_domain = "." in name and not name.endswith(NOBODYS) and not ADDRESS.fullmatch(name)
        return not is_domain or name in self._domains


def identified(request: Request) -> Identity | None:
    """Who calls; None where nobody needs a key."""
    identity: Identity | None = getattr(request.state, "identity", None)
    return identity


def context_of(headers: Mapping[str, str | bytes], identity: Identity | None) -> Context:
    """The context of a call, over either protocol: of an identified caller, whatever name he gives himself."""
    context = wire.context_of_headers(headers)
    return replace(context, caller=identity.caller, tenant=identity.tenant) if identity else context
