"""Which scope a call needs, over either protocol: one table, and whatever is not in it needs `admin`.

So a path or a method that somebody adds is closed until it is written here.
"""

from openbook.serving.access.scopes import Scope

PUBLIC = frozenset(
    {
        "/",
        "/healthz",
        "/readyz",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
        "/openapi.json",
        "/favicon.ico",
        "/grpc.health.v1.Health/Check",
    }
)
"""What tells nothing that a stranger may not know. gRPC's reflection, which Serve answers itself, tells as little."""

NEEDS = {
    "/v1/answer": Scope.ASK,
    "/v1/answer/stream": Scope.ASK,
    "/v1/retrieve": Scope.RETRIEVE,
    "/metrics": Scope.ADMIN,
    "/openbook.v1.AnswerService/Answer": Scope.ASK,
    "/openbook.v1.AnswerService/AnswerStream": Scope.ASK,
    "/openbook.v1.AnswerService/Retrieve": Scope.RETRIEVE,
}
"""By the path of HTTP, which is that of gRPC too: /package.Service/Method."""


def need_of(path: str) -> Scope | None:
    """The scope that a call of this path needs; None if nobody needs any."""
    if path in PUBLIC:
        return None
    return NEEDS.get(path, Scope.ADMIN)
