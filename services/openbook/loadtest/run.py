"""One run, from settings to result: in this process, or in several that share the schedule.

    result = run(LoadSettings(address="127.0.0.1:9000", rate=20, duration_s=10))
    result.measured.goodput_rate, result.measured.latency.p99_s, result.seconds

`measure` is the same for who has an event loop, causes faults meanwhile, and looks in `result.seconds` or
`result.outcomes` at what became of the questions of each moment. `result.check()` raises where the figures are not the
endpoint's: a loop that is busy with other things sends late.
"""

import asyncio
from collections.abc import Callable
from time import monotonic, time

from openbook.loadtest import workers
from openbook.loadtest.drive import OnProgress
from openbook.loadtest.part import part
from openbook.loadtest.result import Result
from openbook.loadtest.settings import LoadSettings

OnBegin = Callable[[float], None]
"""Called with the monotonic time that the times of the run count from, shortly before it."""

LEAD_S = 0.2
"""From when all are ready to the beginning of the run."""


def run(settings: LoadSettings, on_progress: OnProgress = lambda *counts: None) -> Result:
    """`measure`, for who has no event loop."""
    return asyncio.run(measure(settings, on_progress))


async def measure(
    settings: LoadSettings,
    on_progress: OnProgress = lambda *counts: None,
    on_begin: OnBegin = lambda begun: None,
) -> Result:
    """Ask as the settings say, until every question has ended. Passes over late sends: see `Result.check`.

    Raises:
        InvalidDocuments: the questions cannot be read.
        Unreachable: nobody answers at the address.
    """

    def began() -> float:
        begun.extend((monotonic() + LEAD_S, time() + LEAD_S))
        on_begin(begun[0])
        return begun[0]

    begun: list[float] = []
    if settings.processes > 1:
        found = await workers.in_processes(settings, began, on_progress)
    else:
        found = await part(settings, 0, began, on_progress)
    return Result(settings, found, *begun)
