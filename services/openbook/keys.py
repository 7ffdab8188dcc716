"""The commands `openbook keys add`, `list` and `revoke`."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from openbook.errors import InvalidConfig
from openbook.files import at_home
from openbook.serving.access.scopes import Scope

if TYPE_CHECKING:
    from openbook.config import AccessSettings
    from openbook.serving.access.ports import KeyBook

DAY_S = 86_400.0

keys_app = typer.Typer(no_args_is_help=True, help="Who may ask: make, list and revoke API keys.", rich_markup_mode=None)

File = Annotated[Path | None, typer.Option(help="Where keys are kept, if not where the settings say.")]
Config = Annotated[Path | None, typer.Option(help="YAML settings, whose section access says where keys are kept.")]
Limit = Annotated[int | None, typer.Option(help="As access.limits says, if not given.")]


@keys_app.command()
def add(
    name: Annotated[str, typer.Argument(help="Of its holder. Two keys of one name may be alive at once.")],
    scope: Annotated[list[Scope] | None, typer.Option(help="Give each its --scope; ask and retrieve if none.")] = None,
    tenant: Annotated[str, typer.Option(help="Whose caches he shares.")] = "",
    days: Annotated[float | None, typer.Option(help="After which it expires; never if not given.")] = None,
    questions_per_minute: Limit = None,
    questions_per_day: Limit = None,
    tokens_per_minute: Limit = None,
    tokens_per_day: Limit = None,
    file: File = None,
    config: Config = None,
) -> None:
    """Make a key. It is printed this once, and kept nowhere."""
    from openbook.config import Limits, section
    from openbook.serving.access.gate import open_book
    from openbook.serving.access.keys import may_join, mint

    now = time.time()
    limits = section(
        Limits,
        "openbook keys add",
        questions_per_minute=questions_per_minute,
        questions_per_day=questions_per_day,
        tokens_per_minute=tokens_per_minute,
        tokens_per_day=tokens_per_day,
    )
    expires = None if days is None else now + days * DAY_S
    key, record = mint(name, now, scope or (Scope.ASK, Scope.RETRIEVE), tenant, expires, limits)
    access = _access(file, config)
    open_book(access).put(lambda records: may_join(records, record, now))
    path = _path(access)
    place = f" in {path}" if path else ""
    print(f"ob_{record.prefix}_...{place}: {', '.join(record.scopes)}; keep it, it is shown this once", file=sys.stderr)
    print(key)


@keys_app.command("list")
def list_keys(file: File = None, config: Config = None) -> None:
    """List all keys, by what may be seen of them."""
    from openbook.terminal import print_keys

    print_keys(_book(file, config).all(), time.time())


@keys_app.command()
def revoke(
    prefix: Annotated[str, typer.Argument(help="What `openbook keys list` shows of it.")],
    file: File = None,
    config: Config = None,
) -> None:
    """Revoke a key. Within a second nobody is let in with it; what it has begun goes on."""
    from openbook.serving.access.keys import caller_name, revoked

    now = time.time()
    record = _book(file, config).put(lambda records: revoked(records, prefix, now))
    print(f"ob_{record.prefix}_... of {caller_name(record.tenant, record.name)}: revoked")


def _book(file: Path | None, config: Path | None) -> "KeyBook":
    """Of keys that are there. Raises InvalidConfig: their file is not."""
    from openbook.serving.access.gate import open_book

    access = _access(file, config)
    if (path := _path(access)) and not path.exists():
        raise InvalidConfig(f"{path}: no such file; `openbook keys add` makes it")
    return open_book(access)


def _access(file: Path | None, config: Path | None) -> "AccessSettings":
    from openbook.config import AccessSettings, load

    return AccessSettings(keys="file", path=file) if file else load(config).access


def _path(access: "AccessSettings") -> Path | None:
    """Of the file, where keys are in one."""
    return at_home(access.path).absolute() if access.path and access.keys == "file" else None
