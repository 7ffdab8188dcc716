"""Who has files parsed: processes that may die of a file, in whose place others go on behind what killed them."""

import json
import os
import signal
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import count
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from openbook.core.documents import Document
from openbook.core.origin import Field
from openbook.corpus.sources.limits import MB, Failure, Limits
from openbook.corpus.sources.recognise import NAMES, Names
from openbook.corpus.sources.walk import Found
from openbook.corpus.sources.worker import DOCUMENT, END, FAILURE, LEAF, NO_MEMORY, document_of
from openbook.processes import end, of_module, start

MOST_AT_WORK = 64
"""Files and failures that wait for their turn."""

MOST_DEATHS = 10
"""Of an archive's members and of records; each may take as long as the limit of time allows."""


def parsed(
    files: Iterable[Found | Failure],
    limits: Limits,
    n_processes: int,
    fields: tuple[Field, ...] = (),
    names: Names = NAMES,
) -> Iterator[Document | Failure]:
    """What is in the files, in their order, however many processes parse. Little is held: who parses faster than we
    are asked waits.
    """
    with ExitStack() as stack:
        free = [_Parser(limits, fields, names) for _ in range(max(1, n_processes))]
        for each in free:
            stack.callback(each.end)
        at_work: deque[Failure | tuple[_Parser, Found]] = deque()

        def oldest() -> Iterator[Document | Failure]:
            first = at_work.popleft()
            if isinstance(first, Failure):
                yield first
            else:
                parser, file = first
                yield from parser.answers(file)
                free.append(parser)

        for item in files:
            if isinstance(item, Failure):
                at_work.append(item)
            else:
                while not free:
                    yield from oldest()
                parser = free.pop()
                parser.ask(item)
                at_work.append((parser, item))
            while len(at_work) > MOST_AT_WORK:
                yield from oldest()
        while at_work:
            yield from oldest()


class _Died(Exception):
    """The process ended or had to; the message says why."""


class _Parser:
    """A process that parses a file at a time, started when there is one, and again when it died of one."""

    def __init__(self, limits: Limits, fields: tuple[Field, ...], names: Names) -> None:
        self._limits = limits
        self._fields = fields
        self._names = names
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = DefaultSelector()
        self._buffer = bytearray()

    def ask(self, file: Found, skip: int = 0, n_passed: int = 0) -> None:
        """Have a file parsed, or what is behind its first leaves, and behind the first records of the next."""
        if self._process is None:
            command = [*of_module(__name__.replace("parsers", "worker")), json.dumps(asdict(self._limits))]
            command.append(json.dumps([[field.name, field.type] for field in self._fields]))
            command.append(json.dumps(asdict(self._names)))
            self._process = start(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**os.environ, "MALLOC_ARENA_MAX": "2"},  # arenas are address space, of which there is a limit
            )
            assert self._process.stdout is not None
            self._ready.register(self._process.stdout, EVENT_READ)
        assert self._process.stdin is not None
        request = json.dumps([str(file.path), file.name, file.is_given, skip, n_passed])
        with suppress(BrokenPipeError):  # that it has ended is read soon
            self._process.stdin.write(request.encode() + b"\n")

    def answers(self, file: Found) -> Iterator[Document | Failure]:
        """What is in the file that was asked for. Where it kills its parser, that is a failure, and the next of its
        records, or of the files inside of it, comes.
        """
        skip = n_passed = n_failures = 0
        deadly: Failure | None = None  # a record, which is to blame once a parser has passed over it and lives
        begun = ""  # the leaf whose failures are counted, by however many parsers

        def unnamed() -> Iterator[Failure]:
            nonlocal n_failures
            if (n_more := n_failures - self._limits.n_named) > 0:
                yield Failure(begun, f"and {n_more} more that are no documents", n_more)
            n_failures = 0

        for n_deaths in count(1):
            done, n_records, leaf, has_records = skip, 0, None, False
            try:
                while (event := self._event())[0] != END:
                    if event[0] == LEAF:
                        if leaf is not None:
                            yield from unnamed()
                        done, leaf, has_records = event[1:]
                        n_records, begun = 0, leaf or begun
                    elif leaf is not None:
                        n_records += 1
                    if deadly and (n_records == n_passed or (event[0] == LEAF and leaf is None)):
                        yield deadly
                        deadly = None
                    if event[0] == DOCUMENT:
                        yield document_of(event[1:])
                    elif event[0] == FAILURE:
                        n_failures += 1
                        if n_failures <= self._limits.n_named:
                            yield Failure(*event[1:])
                return
            except _Died as why:
                self.end()
                if leaf is not None and has_records and not deadly:
                    skip, n_passed = done - 1, n_records + 1
                    deadly = Failure(f"{leaf}#{n_passed}", str(why))
                else:
                    yield from unnamed()
                    if done <= skip or leaf is not None:
                        yield Failure(leaf or file.name, str(why))
                    if done <= skip:
                        return
                    skip, n_passed, deadly = done, 0, None
                if n_deaths == MOST_DEATHS:
                    if deadly:
                        yield deadly
                    yield from unnamed()
                    yield Failure(file.name, f"killed its parser {n_deaths} times; what else is in it is left out")
                    return
                self.ask(file, skip, n_passed)

    def _event(self) -> list[Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        seen = 0
        while (at := self._buffer.find(b"\n", seen)) < 0:
            seen = len(self._buffer)
            if not self._ready.select(self._limits.timeout_s):
                raise _Died(f"took more than {self._limits.timeout_s:g} s")
            if not (piece := os.read(self._process.stdout.fileno(), 1 << 20)):
                raise _Died(self._why_ended())
            self._buffer += piece
        line = bytes(self._buffer[:at])
        del self._buffer[: at + 1]
        event: list[Any] = json.loads(line)
        if event[0] == NO_MEMORY:
            raise _Died(f"needs more than {self._limits.memory_bytes // MB} MB of memory")
        return event

    def _why_ended(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        how = f"of {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f"its parser died {how}, which may be for want of memory: it has {self._limits.memory_bytes // MB} MB"

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            assert self._process.stdout is not None
            self._ready.unregister(self._process.stdout)
            end(self._process)
            self._process = None
            self._buffer.clear()
