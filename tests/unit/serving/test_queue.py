"""Who may wait for a model, whose turn it is, and what makes a batch: decided on paper, with the hands of a clock."""

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook import telemetry
from openbook.core.context import Context
from openbook.core.deadline import SPARE, Deadline
from openbook.errors import DeadlineExceeded, OpenbookError, Overloaded
from openbook.serving.workers.pace import BELIEVED_S
from openbook.serving.workers.queue import Queue
from openbook.serving.workers.reckoning import Waiting
from openbook.serving.workers.under_way import CREDIT_S, MEMORY_S
from openbook.testing import ManualClock


class Desk:
    """A queue whose model takes `start_s` for a batch and `each_s` for a unit of work, and knows it."""

    def __init__(
        self,
        start_s: float = 0.0,
        each_s: float = 1.0,
        max_batch: int = 4,
        max_queue: int = 100,
        max_work: float = math.inf,
    ) -> None:
        self.clock = ManualClock()
        self.start_s, self.each_s = start_s, each_s
        self.queue: Queue[Waiting] = Queue("model", max_batch, max_queue, max_work, self.clock)
        for work in (1, 4, 1, 4):
            self.queue.learn([self.question(work=work)], self.seconds(work))

    def seconds(self, work: int) -> float:
        return self.start_s + self.each_s * work

    def question(
        self, timeout_s: float = 1e9, caller: str = "", key: str = "", work: int = 1, stream: bool = False
    ) -> Waiting:
        return Waiting(key, key, work, Context(Deadline.after(timeout_s, self.clock), caller=caller), stream)

    def enter(self, timeout_s: float = 1e9, caller: str = "", key: str = "", work: int = 1) -> Waiting:
        waiting = self.question(timeout_s, caller, key, work)
        self.queue.enter(waiting)
        return waiting

    def compute(self) -> tuple[list[Waiting], list[tuple[Waiting, OpenbookError]]]:
        """Take a batch, let its time pass."""
        batch, refused = self.queue.take()
        if batch:
            self.queue.begin(batch)
            self.clock.advance(self.seconds(sum(each.work for each in batch)))
            self.queue.end()
        return batch, refused


def want_of_time() -> float:
    """How many the queues have refused for it."""
    return telemetry.refused("model", "time")._value.get()


def test_what_cannot_be_ready_in_time_is_refused_when_it_comes_and_told_when_to_come_again() -> None:
    desk = Desk(max_batch=1)
    for _ in range(3):
        desk.enter()
    with pytest.raises(Overloaded, match=r"model: would be done in 5.0 s, and the deadline is in 4.5 s") as refused:
        desk.enter(timeout_s=4.5)
    assert refused.value.retry_after_s == pytest.approx(0.5)
    assert len(desk.queue) == 3
    desk.enter(timeout_s=5.1)


def test_the_batch_under_way_counts_as_far_as_it_is_left() -> None:
    desk = Desk(max_batch=1)
    desk.enter(work=4)
    batch, _ = desk.queue.take()
    desk.queue.begin(batch)
    with pytest.raises(Overloaded):
        desk.enter(timeout_s=5)
    desk.clock.advance(2)
    desk.enter(timeout_s=5)


def test_load_is_the_time_of_all_that_is_here_and_what_each_of_the_latest_batch_took() -> None:
    desk = Desk(max_batch=1)
    for _ in range(2):
        desk.enter()
    batch, _ = desk.queue.take()
    desk.queue.begin(batch)
    desk.clock.advance(0.5)
    assert desk.queue.load().seconds == pytest.approx(0.5 + 1)
    stream = desk.question(stream=True)
    desk.queue.enter(stream)
    assert desk.queue.streams() == [stream]
    assert desk.queue.load().seconds == pytest.approx(0.5 + 1 + 1)
    desk.queue.learn([stream, stream], 1.0)
    desk.queue.learn([stream, stream], 0.1, is_whole=False)
    assert desk.queue.load().each_s == 0.5


@given(
    timeouts=st.lists(st.floats(0.5, 30), max_size=40),
    start_s=st.floats(0, 2),
    max_batch=st.integers(1, 8),
)
def test_who_was_let_in_is_ready_in_time_if_predictions_hold(
    timeouts: list[float], start_s: float, max_batch: int
) -> None:
    desk = Desk(start_s=start_s, max_batch=max_batch)
    due = {desk.enter(): math.inf}  # whoever is next is let in, if it might just be in time
    for timeout_s in timeouts:
        with suppress(Overloaded, DeadlineExceeded):
            due[desk.enter(timeout_s)] = desk.clock() + timeout_s
    n_waiting = len(desk.queue)
    while len(desk.queue):
        batch, refused = desk.compute()
        assert not refused
        n_waiting -= len(batch) + len(refused)
        assert all(desk.clock() <= due[each] + 1e-6 for each in batch)
    assert n_waiting == 0


def test_what_would_be_late_even_now_is_no_matter_of_load() -> None:
    before = want_of_time()
    with pytest.raises(DeadlineExceeded, match=r"deadline would pass before model was done: it takes some 4.0 s"):
        Desk().enter(timeout_s=3, work=4)
    assert want_of_time() == before + 1


def test_what_was_not_tried_lately_is_tried() -> None:
    desk = Desk()
    desk.clock.advance(100)
    desk.enter(timeout_s=0.1)
    assert len(desk.compute()[0]) == 1
    desk.enter(timeout_s=0.1, key="never seen")
    assert len(desk.compute()[0]) == 1


def test_one_who_asks_for_much_delays_himself() -> None:
    desk = Desk(max_batch=1)
    for _ in range(10):
        desk.enter(caller="much")
    little = desk.enter(caller="little", timeout_s=3)
    batches = [desk.compute()[0] for _ in range(2)]
    assert [little] in batches


def test_who_is_overtaken_and_late_by_it_is_told_so_without_being_computed() -> None:
    desk = Desk(max_batch=1)
    much = [desk.enter(timeout_s=5.1, caller="much") for _ in range(4)]
    for caller in "abcd":
        desk.enter(timeout_s=100, caller=caller)
    before = want_of_time()
    done, late = [], []
    while len(desk.queue):
        batch, refused = desk.compute()
        assert all(each.remaining_s for each in batch)
        done += batch
        late += refused
    assert {each for each, _ in late} == set(much) - set(done)
    assert len(done) + len(late) == 8
    assert want_of_time() == before + len(late) > before
    assert all(isinstance(error, Overloaded | DeadlineExceeded) for _, error in late)


def test_of_kinds_never_seen_one_is_tried_at_a_time_however_slow_others_are() -> None:
    desk = Desk()
    for _ in range(3):
        desk.enter(work=100, key="slow")
    with pytest.raises(Overloaded):
        desk.enter(timeout_s=200, work=1, key="slow")
    desk.enter(timeout_s=700, work=200, key="new")
    for key in ("new", "newer"):
        with pytest.raises(Overloaded):
            desk.enter(timeout_s=700, work=200, key=key)
    desk.clock.advance(BELIEVED_S)
    desk.enter(timeout_s=700, work=200, key="newer")


def test_of_a_full_queue_the_newest_of_who_has_most_goes() -> None:
    desk = Desk(max_queue=4)
    much = [desk.enter(caller="much") for _ in range(4)]
    want_of_room = telemetry.refused("model", "room")._value
    before = want_of_room.get()
    with pytest.raises(Overloaded, match="model: the queue has room for 4, and 4 wait"):
        desk.enter(caller="much")
    little = [desk.question(caller="little") for _ in range(2)]
    for each, newest in zip(little, (much[3], much[2]), strict=True):
        ((gone, error),) = desk.queue.enter(each)
        assert gone is newest
        assert isinstance(error, Overloaded)
    assert set(desk.queue.waiting()) == {*much[:2], *little}
    assert want_of_room.get() == before + 3


@pytest.mark.parametrize(("came_before_s", "n"), [(0, 2), (MEMORY_S, 1)])  # then all may take twice as long
def test_a_batch_keeps_everybodys_deadline(came_before_s: float, n: int) -> None:
    desk = Desk(start_s=2)
    desk.queue._under_way.came_before(came_before_s)
    all_of_them = [desk.enter(timeout_s=4 * SPARE), *(desk.enter() for _ in range(3))]
    assert desk.queue.take()[0] == all_of_them[:n]


def test_a_batch_grows_as_far_as_that_pays() -> None:
    for start_s, n in ((0.0, 1), (0.07, 2), (0.5, 8)):
        desk = Desk(start_s=start_s, max_batch=8)
        for _ in range(20):
            desk.enter()
        assert len(desk.queue.take()[0]) == n, start_s


def test_one_flood_goes_on_in_full_batches() -> None:
    """They ask again and again, while each batch is computed: as many as are let in."""
    desk = Desk(start_s=0.25, each_s=0.04, max_batch=16)
    sizes = list[int]()
    desk.enter(caller="flood")
    for _ in range(30):
        batch, _ = desk.queue.take()
        desk.queue.begin(batch)
        for _ in range(10):
            desk.clock.advance(desk.seconds(len(batch)) / 10)
            with suppress(Overloaded):
                while True:
                    desk.enter(timeout_s=2.5, caller="flood")
        desk.queue.end()
        sizes.append(len(batch))
    assert sizes == [1, *[16] * 29]


def test_the_last_of_several_batches_counts_as_full() -> None:
    """Those who come until it begins have a part in it."""
    desk = Desk(start_s=4)
    for _ in range(4):
        desk.enter()
    with pytest.raises(Overloaded, match=r"would be done in 20\.0 s"):  # 2 batches of 8 s, times SPARE
        desk.enter(timeout_s=19)


def test_but_not_with_more_such_as_one_that_asks_for_much() -> None:
    desk = Desk(start_s=4, max_work=22)
    desk.enter(work=20)
    for timeout_s in (100, 100, 45):
        desk.enter(timeout_s)
    assert [len(desk.compute()[0]) for _ in range(2)] == [3, 1]
    assert desk.clock() == 31


def test_of_those_who_ask_for_different_work_the_middle_one_counts_so_often() -> None:
    desk = Desk(start_s=4, max_work=10)
    for work in (1, 5):
        desk.enter(work=work)
    # Two batches of 10 / (11 / 3), which is 2.7: 2 * 4 s, and 11 for these three, and 5 for each of 2.5 more.
    with pytest.raises(Overloaded, match=r"would be done in 39\.1 s"):
        desk.enter(timeout_s=39, work=5)


def test_who_is_due_soon_does_not_keep_all_others_waiting_for_a_batch_of_few() -> None:
    def taken(n_others: int, timeout_s: float, came_before_s: float = 0.0) -> tuple[int, list[str]]:
        desk = Desk(start_s=8, max_batch=8)
        desk.queue._under_way.came_before(came_before_s)
        desk.enter(caller="hasty", timeout_s=timeout_s)
        for n in range(n_others):
            desk.enter(caller=f"other {n}")
        batch, refused = desk.queue.take()
        return len(batch), [str(error) for _, error in refused]

    late = "model: too many ask, and now too little time is left"
    assert taken(n_others=12, timeout_s=9.1 * SPARE) == (8, [late])
    assert taken(n_others=12, timeout_s=11.1 * SPARE) == (8, [late])  # with two others
    assert taken(n_others=12, timeout_s=2 * 11.1 * SPARE, came_before_s=MEMORY_S) == (8, [late])  # so too
    assert taken(n_others=12, timeout_s=12.1 * SPARE) == (4, [])  # half of a batch
    assert taken(n_others=7, timeout_s=9.1 * SPARE) == (1, [])  # all have a part in the next one


def test_who_asks_for_much_is_in_the_way_of_no_batch_that_his_work_fills() -> None:
    desk = Desk(start_s=8, max_batch=16, max_work=22)
    large = desk.enter(work=20, timeout_s=30.1 * SPARE)
    small = [desk.enter() for _ in range(24)]
    assert desk.queue.take() == ([large, *small[:2]], [])


def test_nobody_is_in_the_way_where_too_few_others_wait_for_half_a_batch() -> None:
    desk = Desk(start_s=8, max_batch=8)
    all_of_them = [desk.enter(caller=str(n), timeout_s=28.1 + 13) for n in range(12)]
    desk.clock.advance(13)
    desk.queue._under_way.came_before(MEMORY_S)  # all takes twice as long
    assert desk.queue.take() == (all_of_them[:3], [])  # (8 + 3) * 2 * 1.25


def test_nor_by_what_batches_took_long_ago() -> None:
    desk = Desk(start_s=8, max_batch=8)
    desk.clock.advance(BELIEVED_S)
    first = desk.enter(timeout_s=5)  # let in because it is next
    for n in range(12):
        desk.enter(caller=str(n))
    assert desk.queue.take() == ([first], [])


def test_who_asks_for_little_is_in_the_way_of_nobody_who_asks_for_more() -> None:
    desk = Desk(start_s=8, max_batch=8)
    for _ in range(20):
        desk.enter(caller="much")
    little = desk.enter(caller="little", timeout_s=10.1 * SPARE)
    assert len(desk.queue.take()[0]) == 8  # theirs whose turn it is
    assert desk.queue.take() == ([little], [])


def test_a_batch_of_several_has_a_limit_of_work() -> None:
    desk = Desk(start_s=100, max_batch=8, max_work=6)
    large, first, other, behind = (desk.enter(work=work) for work in (9, 3, 4, 3))
    assert [desk.queue.take()[0] for _ in range(3)] == [[large], [first, behind], [other]]


def test_beside_a_long_batch_runs_what_is_short_and_other() -> None:
    desk = Desk()
    long = desk.enter(work=32, key="long")
    batch, _ = desk.queue.take()
    assert batch == [long]
    desk.queue.begin(batch)
    also_long = desk.enter(work=1, key="long")
    not_short = desk.enter(work=8)
    short = desk.enter(work=1)
    assert desk.queue.take(is_short=True)[0] == [short]
    assert set(desk.queue.waiting()) == {also_long, not_short}
    desk.clock.advance(31)
    desk.enter(work=1)
    assert desk.queue.take(is_short=True)[0] == []


def test_all_that_is_short_is_short_together() -> None:
    desk = Desk(start_s=1, max_batch=8)
    desk.enter(work=32, key="long")
    desk.queue.begin(desk.queue.take()[0])  # of 33 s
    short = [desk.enter() for _ in range(5)]
    assert desk.queue.take(is_short=True)[0] == short[:3]  # 1 + 3


def test_what_runs_beside_a_long_batch_is_not_refused_for_the_time_that_it_takes() -> None:
    desk = Desk()
    desk.enter(work=320, key="long", caller="much")
    desk.queue.begin(desk.queue.take()[0])
    for _ in range(3):
        desk.enter(work=1, key="long", caller="much")
    with pytest.raises(Overloaded):
        desk.enter(timeout_s=50, work=1, key="long", caller="much")
    little = desk.enter(timeout_s=50, work=16, caller="little")
    assert desk.queue.take(is_short=True)[0] == [little]
    short = desk.enter(timeout_s=50, work=8, caller="much")
    assert desk.queue.take(is_short=True)[0] == [short]
    stream = desk.question(timeout_s=50, caller="much", stream=True)
    desk.queue.enter(stream)
    assert desk.queue.streams() == [stream]


def test_but_waits_for_all_others_that_run_beside_it_too() -> None:
    desk = Desk()
    desk.enter(work=320, key="long")
    desk.queue.begin(desk.queue.take()[0])
    for _ in range(2):
        desk.enter(timeout_s=50, work=8)  # in half of the time, times SPARE: twenty seconds each
    with pytest.raises(Overloaded, match=r"would be done in 60\.0 s"):
        desk.enter(timeout_s=50, work=8)
    desk = Desk(max_batch=2)
    for _ in range(7):
        desk.queue.enter(desk.question(stream=True))
    assert len(desk.queue.streams()) == 2
    with pytest.raises(Overloaded, match=r"would be done in 10\.0 s"):
        desk.queue.enter(desk.question(timeout_s=9, stream=True))


def test_who_asks_for_little_neither_waits_for_a_batch_of_who_asks_for_much_nor_shares_it() -> None:
    desk = Desk(start_s=100, max_batch=10)
    for _ in range(18):
        desk.enter(caller="much")
    batch, _ = desk.queue.take()
    assert len(batch) == 10
    desk.queue.begin(batch)
    little = desk.enter(caller="little")
    also = desk.enter(caller="also little")
    assert desk.queue.take(is_short=True)[0] == [little, also]
    for _ in range(10):
        desk.enter(caller="some")  # beside eighteen: no few
    assert desk.queue.take(is_short=True)[0] == []
    desk.queue.end()
    late = desk.enter(caller="little")
    assert late not in desk.queue.take()[0]  # theirs who ask for more


def test_who_asks_for_little_of_something_heavy_makes_nobody_late() -> None:
    desk = Desk(max_batch=10)
    for _ in range(3):
        desk.enter(timeout_s=25, work=5, caller="much")
    desk.queue.begin(desk.queue.take()[0])  # of five seconds
    heavy = desk.enter(work=15, caller="little")
    assert desk.queue.take(is_short=True)[0] == [heavy]  # (5 + 15) * 1.25 are 25
    heavier = desk.enter(work=16, caller="other")
    assert desk.queue.take(is_short=True)[0] == []
    desk.queue.end()
    assert heavier in desk.queue.waiting()


def test_who_asks_for_little_is_not_refused_for_those_whom_he_does_not_wait_for() -> None:
    desk = Desk(start_s=10, max_batch=2)
    desk.queue.begin([desk.question(caller="much", work=5)])  # of 15 s
    for caller, n in (("much", 6), ("little", 2)):
        for _ in range(n):
            desk.enter(caller=caller)
    # In turn three batches of two would come first, after the one under way; of his own two, in half of the time.
    with pytest.raises(Overloaded, match=r"would be done in 57.5 s"):  # 23 * 2 * 1.25
        desk.enter(timeout_s=57, caller="little")
    desk.enter(timeout_s=58, caller="little")


def test_nor_for_the_share_of_others_while_he_has_had_less_than_they() -> None:
    desk = Desk(max_batch=2)
    desk.queue.begin([desk.question(caller="much", work=8)])
    for caller, n in (("much", 6), ("little", 2)):
        for _ in range(n):
            desk.enter(caller=caller)
    with pytest.raises(Overloaded, match=r"would be done in 3.8 s"):  # 3 * 1.25: his own, before all others
        desk.enter(timeout_s=3.7, caller="little")
    desk.queue.begin([desk.question(caller="little", work=6)], is_short=True)  # and with that he has had as much
    desk.queue.end(is_short=True, took_s=6)
    with pytest.raises(Overloaded, match=r"would be done in 7.5 s"):
        desk.enter(timeout_s=3.8, caller="little")


def test_who_has_had_less_than_those_whose_batch_is_under_way_goes_first() -> None:
    desk = Desk(max_batch=4)

    def goes_first(caller: str, work: int = 1) -> bool:
        is_first = desk.queue.begin([desk.question(caller=caller, work=work)], is_short=True)
        desk.queue.end(is_short=True, took_s=work)
        return is_first

    for _ in range(9):  # alone: no debt but for what a newcomer may claim
        desk.queue.begin([desk.question(caller="much", work=3)])
    assert goes_first("newcomer", work=3 + CREDIT_S)
    assert not goes_first("newcomer")
    desk = Desk(max_batch=4)
    desk.queue.begin([desk.question(caller="much", work=3), desk.question(caller="other", work=7)])
    assert [goes_first("little") for _ in range(4)] == [True, True, True, False], "three each, and no more than that"
    assert not goes_first("heavy", work=4), "what he asks for counts too"
    assert goes_first("newcomer", work=2)
    two = [desk.question(caller="newcomer"), desk.question(caller="another")]
    assert not desk.queue.begin(two, is_short=True), "who comes along must be owed some too"
    assert not goes_first("much")
    desk.queue.end()
    desk.queue.begin([desk.question(caller="much", work=3)])
    assert goes_first("little"), "the others have gone on"


def test_but_no_stream_does_which_has_its_half_of_the_time() -> None:
    desk = Desk()
    desk.queue.begin([desk.question(caller="much", key="long", work=320)])
    desk.queue.leave(desk.enter(timeout_s=12.6, caller="little", work=10))
    with pytest.raises(Overloaded, match=r"would be done in 25\.0 s"):
        desk.queue.enter(desk.question(timeout_s=24.9, caller="little", work=10, stream=True))
    desk.queue.enter(desk.question(timeout_s=25.1, caller="little", work=10, stream=True))


@pytest.mark.parametrize("n_others", [1, 2])
def test_of_ever_new_callers_one_after_the_other_only_some_go_first(n_others: int) -> None:
    """They would have all the time, as a flood under ever new names would."""
    desk = Desk(max_batch=4)
    desk.queue.begin([desk.question(caller=str(n), work=6) for n in range(n_others)])
    are_first = [desk.queue.begin([desk.question(caller=f"new {n}")], is_short=True) for n in range(99)]
    n_first = 5 * (1 + n_others) + 1  # to where the others get, less what the last one asks for
    assert are_first == [True] * n_first + [False] * (99 - n_first)
    desk.queue.begin([desk.question(caller="0", work=6)])
    assert desk.queue.begin([desk.question(caller="newcomer")], is_short=True), "as the others go on"


def test_streams_count_among_what_is_had() -> None:
    desk = Desk()
    desk.queue.enter(desk.question(caller="streams", work=3, stream=True))
    desk.queue.streams()
    desk.queue.begin([desk.question(caller="much", work=3)])
    assert not desk.queue.begin([desk.question(caller="streams")], is_short=True)
    assert desk.queue.begin([desk.question(caller="little")], is_short=True)


def test_who_asks_for_one_after_the_other_does_not_starve_who_asks_for_four_at_once() -> None:
    desk, n = Desk(start_s=1, max_batch=4), 20
    one_s = 0
    for _ in range(n):
        for _ in range(4):
            desk.enter(caller="four")
        desk.queue.begin(desk.queue.take()[0])  # of five seconds
        goes_first = True
        while goes_first:
            desk.enter(caller="one")
            goes_first = desk.queue.begin(desk.queue.take(is_short=True)[0], is_short=True)
            one_s += 2
            desk.clock.advance(2)
            desk.queue.end(is_short=True, took_s=2)
        desk.clock.advance(5)
        desk.queue.end()
    assert one_s == pytest.approx(5 * n, rel=0.1)


def test_who_asks_for_little_goes_before_a_batch_that_has_no_time_to_spare() -> None:
    desk = Desk(start_s=0.3, max_batch=10)
    for _ in range(4):
        desk.enter(timeout_s=5.4, caller="much")  # 4.3 * 1.25 are 5.375
    desk.queue.begin(desk.queue.take()[0])
    heavy = desk.enter(work=2, caller="other")  # more than half of what it would stop
    assert desk.queue.take(is_short=True)[0] == []
    little = desk.enter(work=1, caller="little")
    assert desk.queue.take(is_short=True)[0] == [little]
    assert heavy in desk.queue.waiting()


def test_what_is_let_past_puts_off_the_batch_under_way_and_is_spared_no_second_time() -> None:
    desk = Desk(each_s=0.1, max_batch=10)
    for _ in range(2):
        desk.enter(timeout_s=5, work=10, caller="much")
    desk.queue.begin(desk.queue.take()[0])  # 2 s of work, due in 5
    past = desk.enter(work=20, caller="little")
    assert desk.queue.take(is_short=True)[0] == [past]
    desk.queue.begin([past], is_short=True)
    desk.clock.advance(2)
    desk.queue.end(is_short=True, took_s=2)  # and now due in 3, with 2 s of work still to do
    desk.enter(work=22, caller="little")
    assert desk.queue.take(is_short=True)[0] == []


def test_what_was_let_past_and_outlives_the_batch_keeps_the_next_one_waiting() -> None:
    desk = Desk(max_batch=1)
    desk.enter(work=4, caller="much")
    desk.enter(work=4, caller="much")
    desk.queue.begin(desk.queue.take()[0])
    desk.enter(work=4, caller="little")
    desk.queue.begin(desk.queue.take(is_short=True)[0], is_short=True)
    desk.queue.end()  # its callers have gone
    with pytest.raises(Overloaded, match=r"would be done in 7.2 s"):  # (4 + 1) * 1.25, and others may come before
        desk.enter(timeout_s=6, caller="other")
    desk.queue.end(is_short=True, took_s=4)
    desk.enter(timeout_s=6, caller="other")


def test_time_that_goes_to_who_asks_for_little_is_time_that_others_wait() -> None:
    def admitted(n_little: int) -> int:
        desk = Desk(max_batch=1, max_queue=250)
        for _ in range(200):
            desk.enter(caller="much")
        for _ in range(100):
            desk.queue.begin(desk.queue.take()[0])
            for n in range(n_little):
                desk.enter(caller=f"little {n}")
                desk.queue.begin(desk.queue.take(is_short=True)[0], is_short=True)
                desk.clock.advance(1)
                desk.queue.end(is_short=True, took_s=1)
            desk.clock.advance(1)
            desk.queue.end()
        while desk.queue.take()[0]:
            pass
        n = 0
        with suppress(Overloaded):
            while True:
                desk.enter(timeout_s=50, caller="much")
                n += 1
        return n

    assert admitted(0) == 40  # of a second each, times SPARE
    assert admitted(1) == pytest.approx(20, abs=2)
    assert admitted(3) == pytest.approx(20, abs=2)  # never less than half


def test_so_is_what_is_short_beside_a_batch_and_what_is_theirs_between_two() -> None:
    desk = Desk()
    desk.enter(work=320, key="long")
    desk.queue.begin(desk.queue.take()[0])
    desk.enter()  # short
    desk.queue.take(is_short=True)
    assert desk.queue._under_way.stretch > 1
    desk = Desk()
    for caller in ("much", "much", "much", "little"):
        desk.enter(caller=caller)
    desk.queue.take()
    assert desk.queue._under_way.stretch == 1
    assert [each.context.caller for each in desk.queue.take()[0]] == ["little"]
    assert desk.queue._under_way.stretch > 1


def test_who_had_to_wait_for_long_is_let_past_again() -> None:
    """He has more here than he asks for at a time."""
    desk = Desk(start_s=100, max_batch=16)
    for _ in range(30):
        desk.enter(caller="much")
    desk.queue.begin(desk.queue.take()[0])
    waited = [desk.enter(caller="little") for _ in range(5)]
    assert desk.queue.take(is_short=True)[0] == waited


def test_of_many_callers_with_a_question_each_nobody_goes_before() -> None:
    desk = Desk(start_s=100, max_batch=10)
    for n in range(30):
        desk.enter(caller=str(n))
    batch, _ = desk.queue.take()
    assert len(batch) == 10
    desk.queue.begin(batch)
    assert desk.queue.take(is_short=True)[0] == []


def test_batches_that_are_stopped_for_being_late_teach_that_the_model_has_become_slow() -> None:
    desk = Desk(max_batch=1)
    for _ in range(100):
        desk.queue.learn([desk.question()], 0.5, is_whole=False)  # says nothing: all of it takes a second
    desk.enter()
    with pytest.raises(Overloaded, match=r"model: would be done in 2\.5 s"):
        desk.enter(timeout_s=2.4)
    desk.enter(timeout_s=2.6)
    for _ in range(100):
        desk.queue.learn([desk.question()], 3.0, is_whole=False)
    with pytest.raises(Overloaded, match=r"model: would be done in 11\.\d s"):
        desk.enter(timeout_s=8)


def test_streams_begin_in_turn_and_so_many_at_once() -> None:
    desk = Desk(max_batch=2)
    streams = [desk.question(caller=str(n), stream=True) for n in range(3)]
    for each in streams:
        desk.queue.enter(each)
    assert desk.queue.take()[0] == []
    begun = desk.queue.streams()
    assert begun == streams[:2]
    assert desk.queue.streams() == []
    desk.queue.leave(begun[0])
    assert desk.queue.streams() == streams[2:]


def test_who_needs_little_is_not_refused_for_the_time_that_streams_take() -> None:
    desk = Desk(max_batch=9)
    for _ in range(8):
        desk.queue.enter(desk.question(caller="much", work=20, stream=True))
    assert len(desk.queue.streams()) == 8
    with pytest.raises(Overloaded, match=r"would be done in 2\.5 s"):  # they have half of the time
        desk.enter(timeout_s=2.4, caller="little")
    desk.queue.leave(desk.enter(timeout_s=2.6, caller="little"))
    with pytest.raises(Overloaded, match=r"would be done in 11\.2 s"):  # as long as each of them
        desk.queue.enter(desk.question(timeout_s=11, caller="little", stream=True))
    last = desk.question(timeout_s=12, caller="little", stream=True)
    desk.queue.enter(last)
    assert desk.queue.streams() == [last]


def test_who_streams_much_leaves_places_for_others() -> None:
    desk = Desk(max_batch=8)
    much = [desk.question(caller="much", work=2, stream=True) for _ in range(9)]
    nobody = [desk.question(stream=True) for _ in range(9)]
    for each in much:
        desk.queue.enter(each)
    assert desk.queue.streams() == much[:7]
    late = desk.question(caller="much", stream=True, timeout_s=23)
    with pytest.raises(Overloaded, match=r"would be done in 23\.8 s"):  # after those of his that wait, and under way
        desk.queue.enter(late)
    little = desk.question(caller="little", stream=True)
    desk.queue.enter(little)
    assert desk.queue.streams() == [little]
    for each in (*much, little):
        desk.queue.leave(each)
    for each in nobody:
        desk.queue.enter(each)
    assert desk.queue.streams() == nobody[:8]  # there are no others


def test_a_kind_that_is_thought_too_slow_is_tried_again_beside_others() -> None:
    desk = Desk(max_batch=1)
    desk.queue.learn([desk.question(key="slow once")], 4.0)
    desk.enter()
    desk.queue.begin(desk.queue.take()[0])
    with pytest.raises(Overloaded, match=r"would be done in 6\.2 s"):
        desk.enter(timeout_s=4.5, key="slow once")
    desk.clock.advance(BELIEVED_S)
    desk.queue.leave(desk.enter(timeout_s=4.5, key="slow once"))  # its caller has gone, and nothing was learned
    with pytest.raises(Overloaded):
        desk.enter(timeout_s=4.5, key="slow once")
    desk.clock.advance(BELIEVED_S)
    desk.enter(timeout_s=4.5, key="slow once")


@pytest.mark.parametrize("stream", [False, True])
def test_but_not_beside_its_like_that_is_computed_already(stream: bool) -> None:
    desk = Desk(max_batch=1)
    desk.clock.advance(BELIEVED_S)
    desk.queue.enter(desk.question(work=4, stream=stream))  # let in because it is next
    if not desk.queue.streams():
        desk.queue.begin(desk.queue.take()[0])
    with pytest.raises(Overloaded, match=r"would be done in 10\.0 s"):  # (4 + 4) * 1.25
        desk.queue.enter(desk.question(timeout_s=6, work=4, stream=stream))
