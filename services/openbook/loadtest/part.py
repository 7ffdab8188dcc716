"""One process's part of a run: which questions, over which protocol, in which loop."""

from collections.abc import Callable

from openbook.loadtest import grpc_sender, http_sender, questions, schedule
from openbook.loadtest.drive import OnProgress, closed_loop, open_loop
from openbook.loadtest.outcomes import Outcomes
from openbook.loadtest.settings import LoadSettings


async def part(settings: LoadSettings, number: int, began: Callable[[], float], on_progress: OnProgress) -> Outcomes:
    """What process `number` of `settings.processes` does of a run.

    `began` is called once all is ready, and says the monotonic time at which the run begins.

    Raises:
        InvalidDocuments: the questions cannot be read.
        Unreachable: nobody answers at the address.
    """
    asked = questions.read(settings.questions)
    plan = schedule.draw(settings, len(asked)).share(number, settings.processes)
    opened = http_sender.opened if settings.is_http else grpc_sender.opened
    async with opened(settings, asked) as sender:
        begin = began()
        if settings.closed is None:
            return await open_loop(plan, sender, settings, begin, on_progress)
        n_callers = len(range(number, settings.closed, settings.processes))
        return await closed_loop(plan, n_callers, sender, settings, begin, on_progress)
