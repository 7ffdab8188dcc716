"""`/docs`: the endpoint's OpenAPI, to read and to try. Swagger UI comes from a package, nothing from another host."""

from functools import partial
from importlib.resources import files

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse

MEDIA_TYPES = {
    "start.js": "text/javascript",
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
}
START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  validatorUrl: null,
});
"""
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>openbook: the API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="swagger-ui"></div>
<noscript>This page needs JavaScript. The same as JSON: <a href="openapi.json">openapi.json</a></noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</html>
"""
# Swagger UI styles its elements where they stand, and has pictures in its style sheet.
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; " + (
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
A_DAY = {"Cache-Control": "public, max-age=86400", "X-Content-Type-Options": "nosniff"}


def add_docs(app: FastAPI) -> None:
    """`/docs`, and what it consists of."""

    @app.get("/docs", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})

    for name, media_type in MEDIA_TYPES.items():
        app.get(f"/docs/{name}", include_in_schema=False)(partial(_file, name, media_type))


def _file(name: str, media_type: str) -> Response:
    own = START.encode() if name == "start.js" else None
    return Response(
        own or files("fastapi_offline").joinpath("static", name).read_bytes(), headers=A_DAY, media_type=media_type
    )
