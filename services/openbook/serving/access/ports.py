"""What the gate needs of where keys are kept, and what `openbook keys` does. The contract stands here."""

from collections.abc import Callable, Sequence
from typing import Protocol

from openbook.serving.access.keys import KeyRecord

LOOK_S = 0.5
"""How old what is known of a key may be while its store answers: a revoked one is refused everywhere after as long."""

Decide = Callable[[Sequence[KeyRecord]], KeyRecord]
"""Which record is to be added or replaced, given all there are. Raises what `openbook keys` is to say."""


class KeyStore(Protocol):
    """Keys as a replica looks them up."""

    async def find(self, digest: str) -> KeyRecord | None:
        """The key with this digest, as its store knew it at most `LOOK_S` ago; None if there is none.

        While the store cannot be asked, a key that was known stays so for `access.known_for_s`.

        Raises:
            KeysUnavailable: the store cannot be asked, and the key is not known, or was known too long ago.
        """
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class KeyBook(Protocol):
    """Keys as whoever hands them out sees them."""

    def all(self) -> list[KeyRecord]:
        """Every key that was ever made. Raises InvalidConfig where they cannot be read."""
        ...

    def put(self, decide: Decide) -> KeyRecord:
        """Add or replace what is decided, by one process at a time. Raises as `decide` and `all`."""
        ...
