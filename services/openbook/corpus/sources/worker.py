"""A process that parses: it takes files by their paths, has little memory, and may be killed at any time.

    python -m openbook.corpus.sources.worker LIMITS FIELDS NAMES

Requests and what comes back are lines of JSON: `[path, name, is_given, skip, n_passed]`, and the `_row` of each event,
then `END`, or `NO_MEMORY`.
"""

import json
import logging
import os
import resource
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields as fields_of
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from openbook.core.documents import Document
from openbook.core.origin import Field, FieldType
from openbook.corpus.sources.limits import Failed, Failure, Limits
from openbook.corpus.sources.opened import Opened, open_regular
from openbook.corpus.sources.parse import Event, Leaf, Parse, reason
from openbook.corpus.sources.recognise import Names

DOCUMENT, FAILURE, LEAF, PROGRESS, END, NO_MEMORY = "document", "failure", "leaf", "progress", "end", "no memory"
_NAMES = tuple(each.name for each in fields_of(Document))
_VALUES = attrgetter(*_NAMES)


def main(limits_json: str, fields_json: str, names_json: str) -> None:
    """Answer requests until standard input ends."""
    limits = Limits(**json.loads(limits_json))
    fields = tuple(Field(name, FieldType(type)) for name, type in json.loads(fields_json))
    names = Names(**{field: tuple(given) for field, given in json.loads(names_json).items()})
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the others reserve address space for more than they use
    _lower(resource.RLIMIT_AS, limits.memory_bytes)
    _lower(resource.RLIMIT_FSIZE, limits.spooled_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    logging.disable()
    warnings.simplefilter("ignore")
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no event
    try:
        for line in sys.stdin:
            path, name, is_given, *passed = json.loads(line)
            open_file = partial(open_regular, Path(path), name, limits, is_given, fields, names)
            _answer(out, name, open_file, Parse(*passed))
    except MemoryError:
        _say(out, NO_MEMORY)
    except BrokenPipeError:  # nobody wants to know any more
        os._exit(1)


def _answer(out: BinaryIO, name: str, open_file: Callable[[], Opened], parse: Parse) -> None:
    try:
        opened = open_file()
    except (OSError, Failed) as error:
        _say(out, FAILURE, name, reason(error))
    else:
        with opened.file:
            for event in parse.events(opened):
                _say(out, *_row(event))
    _say(out, END)


def document_of(row: list[Any]) -> Document:
    """What became a `_row` and has come out of JSON."""
    known = dict(zip(_NAMES, row, strict=True))
    known |= {"sections": tuple((at, name) for at, name in known["sections"]), "pages": tuple(known["pages"])}
    return Document(**known)


def _row(event: Event) -> list[Any]:
    match event:
        case Document():
            return [DOCUMENT, *_VALUES(event)]
        case Failure():
            return [FAILURE, event.path, event.reason]
        case Leaf():
            return [LEAF, event.number, event.path, event.has_records]
        case None:
            return [PROGRESS]


def _say(out: BinaryIO, *row: Any) -> None:
    out.write(json.dumps(row).encode() + b"\n")
    out.flush()


def _lower(which: int, limit: int) -> None:
    _, most = resource.getrlimit(which)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    with suppress(ValueError, OSError):  # macOS knows the limit of address space, and refuses to set it
        resource.setrlimit(which, (limit, limit))


if __name__ == "__main__":
    main(*sys.argv[1:])
