"""How many calls of one stream may be under way, and how much of replies to them."""

from threading import Event, Thread

import pytest

from openbook.index.server.room import MAX_UNSENT, MAX_UNSENT_BYTES, Room


@pytest.mark.parametrize(("n_calls", "size_bytes"), [(MAX_UNSENT, 0), (1, MAX_UNSENT_BYTES)])
def test_who_takes_no_replies_is_read_again_once_there_is_room(n_calls: int, size_bytes: int) -> None:
    room, full, read = Room(), Event(), Event()

    class Signal:
        """Of what is waited for, that there is a wait."""

        def __init__(self) -> None:
            self.put, self._get = room._more.put, room._more.get

        def get(self) -> None:
            full.set()
            self._get()

    room._more = Signal()  # type: ignore[assignment]

    def reads() -> None:
        room.change(n_calls - 1, size_bytes - 1)
        room.wait()  # there is room
        room.change(1, 1)
        room.wait()
        read.set()

    Thread(target=reads, daemon=True).start()
    assert full.wait(60)
    assert not read.is_set()
    room.change(-1, -1)
    assert read.wait(60)
