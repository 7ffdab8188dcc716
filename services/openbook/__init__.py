"""openbook: retrieval-augmented generation (Lewis et al. 2020) as a distributed system with its own index tier."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openbook.client import AsyncClient, Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("AsyncClient", "Client"):  # when they are asked for: who imports a tier needs no gRPC
        from openbook import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
