"""Which scope a call needs, over either protocol: one table, and whatever is not in it needs `admin`.

So a path or a method that somebody adds is closed until it is written here.
"""

from openbook.serving.access.scopes import Scope

PAGE = ("ask.js", "draw.js", "icon.svg", "model.js", "page.css", "page.js")
PUBLIC = frozenset(
    {
        "/",
        *(f"/page/{name}" for name in PAGE),
        "/healthz",
        "/readyz",
        "/docs",
        "/docs/start.js",
        "/docs/swagger-ui-bundle.js",
        "/docs/swagger-ui.css",
        "/openapi.json",
        "/favicon.ico",
        "/grpc.health.v1.Health/Check",
    }
)
"""What tells nothing that a stranger may not know. gRPC's reflection, which Serve answers itself, tells as little."""

NEEDS = {
    "/v1/answer": Scope.ASK,
    "/v1/answer/batch": Scope.ASK,
    "/v1/answer/stream": Scope.ASK,
    "/v1/retrieve": Scope.RETRIEVE,
    "/v1/chat/completions": Scope.ASK,
    "/v1/embeddings": Scope.RETRIEVE,
    "/v1/models": Scope.ASK,
    "/v1/passages": Scope.RETRIEVE,
    "/mcp": Scope.ASK,  # and RETRIEVE for the tools that retrieve
    "/metrics": Scope.ADMIN,
    "/openbook.v1.AnswerService/Answer": Scope.ASK,
    "/openbook.v1.AnswerService/AnswerBatch": Scope.ASK,
    "/openbook.v1.AnswerService/AnswerStream": Scope.ASK,
    "/openbook.v1.AnswerService/GetPassage": Scope.RETRIEVE,
    "/openbook.v1.AnswerService/Retrieve": Scope.RETRIEVE,
}
"""By the path of HTTP, which is that of gRPC too: /package.Service/Method."""


def need_of(path: str) -> Scope | None:
    """The scope that a call of this path needs; None if nobody needs any."""
    if path in PUBLIC:
        return None
    if path.startswith("/v1/models/"):  # the names of models have slashes in them
        path = "/v1/models"
    if path.startswith("/v1/passages/"):
        path = "/v1/passages"
    return NEEDS.get(path, Scope.ADMIN)
