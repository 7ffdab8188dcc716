"""What a reply over HTTP is held to: the description in /openapi.json. schemathesis loads it as its hooks too."""

from typing import Any

import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

OWN_DEADLINE_S = 1.0


@schemathesis.check
def no_error_of_ours(ctx: Any, response: Any, case: Any) -> None:
    """`not_a_server_error`, but for 504 within a deadline so short that the caller himself made it one."""
    if response.status_code == 504 and any(
        _seconds(each.get("timeout_s")) < OWN_DEADLINE_S for each in (case.body, case.query) if isinstance(each, dict)
    ):
        return
    not_a_server_error(ctx, response, case)


def _seconds(value: Any) -> float:
    if isinstance(value, list):  # said several times in a query: the last one counts
        value = value[-1] if value else None
    return float(value or "inf")


DESCRIBED = [
    no_error_of_ours,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
