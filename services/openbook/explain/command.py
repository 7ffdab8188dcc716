"""The command `openbook explain`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from openbook.core.types import Formulation, RetrieverKind
from openbook.errors import InvalidConfig


def explain(
    context: typer.Context,
    question: str,
    html: Annotated[Path | None, typer.Option(help="Write it as one HTML page here.")] = None,
    server: Annotated[str, typer.Option(help="host:port of the gRPC endpoint.")] = "127.0.0.1:9000",
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", "--timeout", help="Seconds within which each answer is worth having.")
    ] = 30.0,
    k: Annotated[int | None, typer.Option(help="Passages to retrieve.")] = None,
    retriever: Annotated[RetrieverKind | None, typer.Option(help="Who finds passages.")] = None,
    bm25_weight: Annotated[float | None, typer.Option(help="Hybrid: dense + so much of BM25's.")] = None,
    without: Annotated[list[int] | None, typer.Option(help="Id of a passage that is no evidence.")] = None,
    formulation: Annotated[Formulation | None, typer.Option(help="How passages are marginalised out.")] = None,
    n_beams: Annotated[int | None, typer.Option("--n-beams", "--beams", help="1 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Of an answer.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Who signs the endpoint's certificate, PEM; none: plain.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Our own certificate, PEM, if it asks for one.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Of our certificate, PEM.")] = None,
) -> None:
    """Ask a running system, and show why: what was found, what each passage alone would say, which word rests on what.

    Where a key is needed, it is taken from OPENBOOK_API_KEY.
    """
    from openbook.client import Client
    from openbook.explain.explanation import explain
    from openbook.explain.screen import print_explanation
    from openbook.terminal import console

    if html and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise InvalidConfig(f"--html must be a file in a folder that exists, got {html}")
    about_us = ("question", "html", "server", "timeout_s", "tls_ca", "tls_cert", "tls_key")
    options = {name: value for name, value in context.params.items() if name not in about_us}
    api_key = os.environ.get("OPENBOOK_API_KEY")
    with Client(server, timeout_s, api_key, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key) as client:
        explained = explain(client, question, **options)
    print_explanation(explained, console)
    if html is not None:
        html.write_text(explained.page(), encoding="utf-8")
        print(f"{html}: written")
