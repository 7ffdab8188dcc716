"""Calls made at once."""

import asyncio

import pytest

from openbook.core.together import all_of


def test_where_one_fails_the_others_end() -> None:
    ended: list[bool] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fails() -> None:
        raise ValueError

    async def scenario() -> None:
        with pytest.raises(ValueError, match=r"^$"):
            await all_of([waits(), fails()])
        await asyncio.sleep(0)  # a cancelled task ends in its next turn
        assert ended

    asyncio.run(scenario())
