"""`openbook deploy`: a topology as files, and a Serve config on a cluster."""

from pathlib import Path
from typing import Annotated

import typer

deploy_app = typer.Typer(no_args_is_help=True, help="Onto many machines.")


@deploy_app.command("serve")
def deploy_serve(
    config: Annotated[Path, typer.Argument(help="A Serve config, such as deploy/serve.yaml.")],
    index_nodes: Annotated[int, typer.Option(help="How many nodes with the resource `index` to wait for.")] = 1,
    shards: Annotated[int, typer.Option(help="Of the snapshot; each index node serves all of them.")] = 1,
    snapshot: Annotated[
        str | None, typer.Option(help="Its folder on the index nodes: start index servers there, and Redis here.")
    ] = None,
    index_port: Annotated[int, typer.Option(help="Of shard 0; the others follow.")] = 7000,
    redis_port: Annotated[int, typer.Option(help="Of the cache.")] = 6380,
    keys_port: Annotated[int, typer.Option(help="Of the Redis that has the keys.")] = 6381,
    # An hour for servers to read their files (`LOADS_WITHIN_S`), half of one for machines to begin and install.
    timeout: Annotated[float, typer.Option(help="Seconds to wait for index servers, then for Serve.")] = 5400.0,
) -> None:
    """Deploy on a Ray cluster once its index servers answer. Run it on the head node, as ray_cluster.yaml does."""
    from openbook.logs import setup_logging
    from openbook.serving.launch.cluster import deploy
    from openbook.serving.launch.ports import ClusterPorts

    setup_logging("deploy")
    ports = ClusterPorts(index_port, redis_port, keys_port)
    deploy(config, index_nodes, shards, timeout, ports, snapshot=snapshot)


@deploy_app.command("render")
def deploy_render(
    topology: Annotated[Path, typer.Argument(help="A topology file, such as deploy/topology.yaml.")],
    out: Annotated[Path, typer.Option(help="The folder that one deploys from.")] = Path(),
) -> None:
    """Write all that follows from a topology. For `ray up`, Kubernetes, Compose and systemd."""
    from openbook.deployment import render

    for path in render.write(render.render(render.load(topology)), out):
        print(out / path)


@deploy_app.command("keys-url")
def keys_url(
    token: Annotated[Path, typer.Option(help="The file of Ray's token.")] = Path("~/openbook/secrets/ray-token"),
    port: Annotated[int, typer.Option(help="As `deploy serve --keys-port`.")] = 6381,
) -> None:
    """Print where the keys of this head are: for `openbook keys`, as OPENBOOK_ACCESS__URL."""
    from openbook.serving.launch.cluster import password_of

    print(f"redis://:{password_of(token)}@127.0.0.1:{port}/0")
