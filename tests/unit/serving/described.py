"""What a reply over HTTP is held to: the description in /openapi.json. schemathesis loads it as its hooks too."""

import math
from typing import Any
from urllib.parse import parse_qs, urlsplit

import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

OWN_DEADLINE_S = 1.0


@schemathesis.check
def no_error_of_ours(ctx: Any, response: Any, case: Any) -> None:
    """`not_a_server_error`, but for 504 within a deadline so short that the caller himself made it one."""
    if response.status_code == 504 and _deadline_s(response.request.url, case.body) < OWN_DEADLINE_S:
        return
    not_a_server_error(ctx, response, case)


def _deadline_s(url: str, body: Any) -> float:
    """As it was sent: a list in a query becomes several, of which the last one counts, and leaves out what is None."""
    said = parse_qs(urlsplit(url).query).get("timeout_s", [])
    said += [body.get("timeout_s")] if isinstance(body, dict) else []
    return float(said[-1] or "inf") if said else math.inf


DESCRIBED = [
    no_error_of_ours,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
