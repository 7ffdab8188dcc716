"""On whose behalf a request over HTTP is served."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request

from openbook.core.context import Context
from openbook.logs import as_ours
from openbook.serving.endpoint.guard import context_of, identified
from openbook.serving.endpoint.replies import request_id_of
from openbook.serving.endpoint.service import with_request_id


@contextmanager
def asked(request: Request, request_id: str = "") -> Iterator[Context]:
    """The request's context, with the id of the body, else the header's, else a new one.

    Whatever is raised in the block becomes an error of ours.
    """
    try:
        context = with_request_id(context_of(request.headers, identified(request)), request_id)
        request.state.request_id = context.request_id
        yield context
    except Exception as error:
        raise as_ours(error, request_id_of(request)) from None
