"""Whether strangers may reach the endpoint: not without keys, unless that was waived by name."""

from openbook.config import AccessSettings, Settings
from openbook.errors import InvalidConfig
from openbook.processes import is_loopback


def check_exposure(where: str, access: AccessSettings) -> None:
    """Stop what would answer everybody who reaches it, though nobody said that it should.

    Args:
        where: what others can reach.
        access: who may ask.

    Raises:
        InvalidConfig: names both ways out.
    """
    if not (access.is_guarded or access.allow_anonymous):
        raise InvalidConfig(
            f"{where}: others reach it, and nobody needs a key. Either set access.keys to file or redis "
            "(`openbook keys add` makes a key), or let everybody in with access.allow_anonymous: true"
        )


def check_host(settings: Settings) -> None:
    """As `check_exposure`, for an endpoint that listens where its settings say."""
    if not is_loopback(settings.serving.host):
        check_exposure(f"serving.host = {settings.serving.host}", settings.access)
