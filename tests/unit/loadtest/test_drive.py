"""Loops of questions to a sender that does what a test says."""

import asyncio
from time import monotonic

from openbook.loadtest.drive import closed_loop
from openbook.loadtest.outcomes import OK, Reply
from openbook.loadtest.schedule import draw
from openbook.loadtest.settings import LoadSettings


def test_who_is_to_end_takes_that_for_no_outcome_and_asks_no_more() -> None:
    settings = LoadSettings(address="a:1", closed=1, duration_s=0.1, warm_up_s=0.0)
    sends = asyncio.Event()
    n_asked: list[int] = []

    class Sender:
        async def send(self, number: int) -> Reply:
            n_asked.append(1)
            sends.set()
            if len(n_asked) == 1:
                await asyncio.Event().wait()
            return Reply(OK, OK)

    async def main() -> None:
        plan = draw(settings, n_questions=1)
        run = asyncio.create_task(closed_loop(plan, 1, Sender(), settings, monotonic(), lambda *counts: None))
        await sends.wait()
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()

    asyncio.run(main())
    assert len(n_asked) == 1
