"""The page at `/`: the files of serving/page, read once, and what the browser is told to allow them."""

import gzip
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response

FOLDER = Path(__file__).parents[1] / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text that becomes markup is an error: passages are anybody's text
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for by its ETag each time: another version has the same names
    "Vary": "Accept-Encoding",
}
GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", re.IGNORECASE)
"""Where it is named, but not as what may not be."""


@dataclass(frozen=True, slots=True)
class _File:
    media_type: str
    plain: bytes
    packed: bytes  # by gzip
    digest: str  # of what it holds: the same from every replica


def mount_page(app: FastAPI) -> None:
    """Serve the page at `/` and what it loads below `/page/`, each at a path of its own."""
    for file in sorted(FOLDER.iterdir()):
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        app.add_api_route(path, _handler(_read(file)), include_in_schema=False)


def _handler(file: _File) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return _reply(file, request)

    return handle


def _read(path: Path) -> _File:
    plain = path.read_bytes()
    packed = gzip.compress(plain, mtime=0)
    return _File(MEDIA_TYPES[path.suffix], plain, packed, hashlib.sha256(plain).hexdigest()[:32])


def _reply(file: _File, request: Request) -> Response:
    """The file, or 304 where the browser has it already."""
    packs = bool(GZIP.search(request.headers.get("Accept-Encoding", "")))
    tag = f'"{file.digest}{"-gzip" if packs else ""}"'
    headers = {**HEADERS, "ETag": tag}
    known = request.headers.get("If-None-Match", "")
    if tag in known or known.strip() == "*":
        return Response(status_code=304, headers=headers)
    if packs:
        headers["Content-Encoding"] = "gzip"
    return Response(file.packed if packs else file.plain, media_type=file.media_type, headers=headers)
