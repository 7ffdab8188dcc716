"""Several processes that share one run's schedule, each with its own event loop, connections and core.

`python -m openbook.loadtest.workers FOLDER NUMBER` is one of them. It reads FOLDER/settings.json, connects, and says
`ready`; a line with the monotonic time of the beginning, a clock that the processes of a machine share, starts it. It
then says how it goes, and leaves FOLDER/NUMBER.npz. What it says are lines of JSON.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from openbook import processes
from openbook.errors import OpenbookError
from openbook.files import temporary_folder
from openbook.loadtest import outcomes
from openbook.loadtest.drive import OnProgress
from openbook.loadtest.outcomes import Outcomes
from openbook.loadtest.part import part
from openbook.loadtest.senders import Unreachable
from openbook.loadtest.settings import LoadSettings

SETTINGS = "settings.json"
Process = subprocess.Popen[str]


async def in_processes(settings: LoadSettings, began: Callable[[], float], on_progress: OnProgress) -> Outcomes:
    """The outcomes of all processes, as if one had seen them all.

    Raises:
        Unreachable: one of them could not begin; with what it says.
    """
    numbers = range(settings.processes)
    with temporary_folder("openbook-loadtest-") as folder, ExitStack() as stack:
        # Of the standard library: pydantic's JSON refuses a file's name that is not UTF-8.
        (folder / SETTINGS).write_text(json.dumps(settings.model_dump(mode="json")), encoding="utf-8")
        # A thread each, which reads what it says. They are left last: they end when their processes have.
        threads = stack.enter_context(ThreadPoolExecutor(settings.processes))
        started = []
        for number in numbers:
            started.append(_start(folder, number))
            stack.callback(processes.end, started[-1])
        loop = asyncio.get_running_loop()
        for said in await asyncio.gather(*(loop.run_in_executor(threads, _line, process) for process in started)):
            if said != "ready":
                raise Unreachable(str(said))
        begin = began()
        counts = [[0, 0, 0] for _ in numbers]

        def tell(number: int, said: list[int]) -> None:
            counts[number] = said
            on_progress(*(sum(column) for column in zip(*counts, strict=True)))

        def follow(number: int, process: Process) -> None:
            assert process.stdin
            process.stdin.write(f"{begin!r}\n")
            process.stdin.flush()
            while isinstance(said := _line(process), list):
                loop.call_soon_threadsafe(tell, number, said)
            if said != "done":
                raise Unreachable(str(said))

        await asyncio.gather(*(loop.run_in_executor(threads, follow, *each) for each in enumerate(started)))
        return outcomes.join([outcomes.load(folder / f"{number}.npz") for number in numbers])


def _start(folder: Path, number: int) -> Process:
    command = [*processes.of_module(__name__), str(folder), str(number)]
    return processes.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: Process) -> Any:
    assert process.stdout
    line = process.stdout.readline()
    return json.loads(line) if line else f"a process of the load generator ended early, with exit code {process.wait()}"


def main(folder: Path, number: int) -> None:
    """One of the processes."""

    def say(value: object) -> None:
        print(json.dumps(value), flush=True)

    def began() -> float:
        say("ready")
        return float(sys.stdin.readline())

    settings = LoadSettings.model_validate(json.loads((folder / SETTINGS).read_bytes()))
    try:
        found = asyncio.run(part(settings, number, began, lambda *counts: say(counts)))
    except OpenbookError as error:
        say(str(error))
        sys.exit(1)
    found.save(folder / f"{number}.npz")
    say("done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
