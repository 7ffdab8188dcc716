"""The command `openbook explain`."""

from pathlib import Path
from typing import Annotated

import typer

from openbook.core.types import Decoding, Formulation, RetrieverKind
from openbook.reaching import TLS, Ca, Cert, Key, Tls, client


def explain(
    context: typer.Context,
    question: str,
    html: Annotated[Path | None, typer.Option(help="Write it as one HTML page here.")] = None,
    server: Annotated[str, typer.Option(help="host:port of the gRPC endpoint.")] = "127.0.0.1:9000",
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", "--timeout", help="Seconds within which each answer is worth having.")
    ] = 30.0,
    k: Annotated[int | None, typer.Option(help="Passages to retrieve.")] = None,
    nprobe: Annotated[int | None, typer.Option(help="IVF: cells looked at.")] = None,
    ef_search: Annotated[int | None, typer.Option(help="HNSW: candidates kept.")] = None,
    rerank_factor: Annotated[int | None, typer.Option(help="Candidates per hit scored exactly.")] = None,
    retriever: Annotated[RetrieverKind | None, typer.Option(help="Who finds passages.")] = None,
    bm25_weight: Annotated[float | None, typer.Option(help="Hybrid: dense + so much of BM25's.")] = None,
    without: Annotated[list[int] | None, typer.Option(help="Id of a passage that is no evidence.")] = None,
    formulation: Annotated[Formulation | None, typer.Option(help="How passages are marginalised out.")] = None,
    decoding: Annotated[Decoding | None, typer.Option(help="How RAG-Sequence scores its candidates.")] = None,
    n_beams: Annotated[int | None, typer.Option("--n-beams", "--beams", help="1 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Of an answer.")] = None,
    tls: Tls = False,
    tls_ca: Ca = None,
    tls_cert: Cert = None,
    tls_key: Key = None,
) -> None:
    """Ask a running system, and show why: what was found, what each passage alone would say, which word rests on what.

    Where a key is needed, it is taken from OPENBOOK_API_KEY.
    """
    from openbook import files
    from openbook.explain.explanation import explain
    from openbook.explain.screen import print_explanation
    from openbook.terminal import console

    if html is not None:
        files.check_place(html)
    about_us = ("question", "html", "server", "timeout_s", *TLS)
    options = {name: value for name, value in context.params.items() if name not in about_us}
    with client(server, context.params, timeout_s) as endpoint:
        explained = explain(endpoint, question, **options)
    print_explanation(explained, console)
    if html is not None:
        files.write(html, explained.page())
        print(f"{html}: written")
