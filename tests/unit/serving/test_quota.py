"""Quotas: the arithmetic of windows, what callers are told, and what counts as how much."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_gate import ask, bearer
from test_service import GrpcContext, service

from openbook.config import Limits, parse
from openbook.errors import (
    DeadlineExceeded,
    InvalidConfig,
    InvalidRequest,
    ModelUnavailable,
    OpenbookError,
    Overloaded,
    QuotaExceeded,
    ShardUnavailable,
)
from openbook.serving.access.counters import Counters
from openbook.serving.access.gate import Gate
from openbook.serving.access.key_file import KeyFile, KeyFileBook
from openbook.serving.access.keys import Identity, mint
from openbook.serving.access.quota import Asked, Policy, Taken, headers, policies_of, priced, refusal, standings, take
from openbook.serving.access.quotas import Quotas, _Account
from openbook.serving.access.scopes import Scope
from openbook.serving.endpoint.ingress import AnswerIngress
from openbook.telemetry import refused
from openbook.testing import ManualClock
from openbook.v1 import answer_pb2

MINUTE, DAY = Policy("questions", "minute", 3), Policy("questions", "day", 5)
BOTH = ((MINUTE, 1), (DAY, 1))


def test_so_many_are_granted_in_a_window_and_the_next_begins_anew() -> None:
    counts: dict[str, tuple[int, int]] = {}
    granted = [take(counts, BOTH, now).granted for now in (0, 10, 59, 59, 60, 61, 62, 86_400)]
    assert granted == [True, True, True, False, True, True, False, True]  # 3 a minute, then 5 a day


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), max_size=60))
def test_no_window_grants_more_than_its_limit_and_nothing_is_counted_that_was_refused(
    steps: list[tuple[int, int]],
) -> None:
    counts: dict[str, tuple[int, int]] = {}
    now, granted = 0, []
    for passed, cost in steps:
        now += passed
        before = dict(counts)
        taken = take(counts, ((MINUTE, cost), (DAY, cost)), now)
        if taken.granted:
            granted.append((now, cost))
        else:
            assert counts == before
            assert all(used <= policy.limit for used, policy in zip(taken.used, (MINUTE, DAY), strict=True))
    for policy in (MINUTE, DAY):
        for number in {at // policy.window_s for at, _ in granted}:
            assert sum(cost for at, cost in granted if at // policy.window_s == number) <= policy.limit


def test_a_refusal_says_what_is_used_up_and_when_the_last_of_it_comes_back() -> None:
    counts = {"questions-minute": (1, 3), "questions-day": (0, 5)}
    taken = take(counts, BOTH, 70)
    error = refusal(BOTH, taken)
    assert str(error) == "5 of 5 questions a day are used, and 1 more are asked for: the next day begins in 86330 s"
    assert (error.retry_after_whole_s, isinstance(error, Overloaded)) == (86_330, True)
    assert [(each.left, each.reset_s) for each in standings(BOTH, taken)] == [(0, 50), (0, 86_330)]
    of_minute = take({**counts, "questions-day": (0, 4)}, BOTH, 70)  # what is left of the day would do
    assert refusal(BOTH, of_minute).retry_after_s == 50
    assert [each.left for each in standings(BOTH, Taken(False, 70, (7, 9)))] == [0, 0], "a limit was lowered"


def test_headers_are_those_of_the_draft() -> None:
    """draft-ietf-httpapi-ratelimit-headers-10: lists of strings with parameters, of structured fields."""
    asked = priced(policies_of(Limits(questions_per_minute=3, tokens_per_day=1000)), 1, 32)
    assert headers(standings(asked, take({}, asked, 10))) == {
        "ratelimit-policy": '"questions-minute";q=3;w=60, "tokens-day";q=1000;w=86400;qu="tokens"',
        "ratelimit": '"questions-minute";r=2;t=50, "tokens-day";r=968;t=86390',
    }
    assert headers(()) == {}


def test_what_no_window_grants_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest, match=r"at most 10 tokens, which .* in a minute, got 32"):
        priced(policies_of(Limits(tokens_per_minute=10)), 1, 32)


def test_without_redis_each_replica_counts_and_nobody_is_unlimited() -> None:
    async def scenario() -> None:
        clock = ManualClock(1000.0)
        quotas = Quotas(None, clock)
        for caller, limit in (("web", 2), ("other", None)):
            quotas.open(Identity(caller, "", frozenset(), Limits(questions_per_minute=limit)))
        for _ in range(2):
            await quotas.charge("web")
        with pytest.raises(QuotaExceeded):
            await quotas.charge("web")
        for _ in range(10):
            await quotas.charge("other")
            await quotas.charge("nobody has a limit whom nobody let in")
        clock.advance(60)
        await quotas.charge("web")

    asyncio.run(scenario())


def test_of_too_many_callers_those_are_forgotten_who_did_not_come_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.serving.access.quotas.N_ACCOUNTS", 2)
    quotas = Quotas(None, ManualClock(1000.0))
    for caller in ("one", "two", "one", "three"):
        quotas.open(replace(web(questions_per_day=1), caller=caller))
    assert list(quotas._accounts) == ["one", "three"]


@pytest.mark.parametrize(
    ("error", "n_left"),
    [(Overloaded, 3), (ShardUnavailable, 3), (ModelUnavailable, 3), (DeadlineExceeded, 1), (InvalidRequest, 1)],
)
def test_what_fails_for_want_of_a_place_a_shard_or_a_model_is_given_back(
    error: type[OpenbookError], n_left: int
) -> None:
    async def scenario() -> None:
        quotas = Quotas(None, ManualClock(1000.0))
        quotas.open(web(questions_per_day=3))
        with pytest.raises(error):
            async with quotas.charged("web", 2):
                raise error("none")
        assert f"r={n_left};" in quotas.headers(web(questions_per_day=3))["ratelimit"]
        for _ in range(n_left):
            await quotas.charge("web")
        with pytest.raises(QuotaExceeded):
            await quotas.charge("web")

    asyncio.run(scenario())


class Shared(Counters):
    """Counts as Redis does, whose script is `take` in Lua; out of reach when told."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.is_up = clock, True
        self.counts: dict[str, tuple[int, int]] = {}

    async def take(self, caller: str, asked: Asked) -> Taken | None:
        await asyncio.sleep(0)  # others go on meanwhile
        return take(self.counts, asked, int(self.clock())) if self.is_up else None


def web(**limits: int) -> Identity:
    """A caller, by a key with these limits."""
    return Identity("web", "", frozenset(), Limits(**limits))


def five_a_day() -> tuple[Quotas, Shared]:
    clock = ManualClock(1000.0)
    shared = Shared(clock)
    quotas = Quotas(shared, clock)
    quotas.open(web(questions_per_day=5))
    return quotas, shared


async def give_back(quotas: Quotas, shared: Shared, n_questions: int, was_up: bool, is_up: bool) -> None:
    """Charge so many while Redis is there or not, and give them back while it is or not."""
    shared.is_up = was_up
    with contextlib.suppress(Overloaded):
        async with quotas.charged("web", n_questions):
            shared.is_up = is_up
            raise Overloaded("none")


def test_what_a_replica_counted_for_itself_is_given_back_there_and_not_in_redis() -> None:
    async def scenario() -> None:
        quotas, shared = five_a_day()
        await quotas.charge("web", 3)
        await give_back(quotas, shared, 2, was_up=False, is_up=True)
        assert shared.counts == {"questions-day": (0, 3)}
        shared.is_up = False
        await quotas.charge("web", 2)

    asyncio.run(scenario())


def test_who_was_refused_by_what_others_asked_for_may_go_on_once_redis_is_out_of_reach() -> None:
    async def scenario() -> None:
        quotas, shared = five_a_day()
        shared.counts["questions-day"] = (0, 5)
        for _ in range(6):
            with pytest.raises(QuotaExceeded):
                await quotas.charge("web")
        shared.is_up = False
        await quotas.charge("web", 5)

    asyncio.run(scenario())


def test_what_redis_counted_is_given_back_there_with_the_next_question_if_it_is_out_of_reach() -> None:
    async def scenario() -> None:
        quotas, shared = five_a_day()
        for n_questions in (1, 3):
            await give_back(quotas, shared, n_questions, was_up=True, is_up=False)
        assert "r=5;" in quotas.headers(web(questions_per_day=5))["ratelimit"]
        shared.is_up = True
        await asyncio.gather(*(quotas.charge("web") for _ in range(3)))  # one of them takes it along
        assert shared.counts == {"questions-day": (0, 3)}
        await give_back(quotas, shared, 2, was_up=True, is_up=False)
        shared.is_up = True
        with pytest.raises(QuotaExceeded):
            await quotas.charge("web", 3)  # and still owed: 3 of 5 are used
        await quotas.charge("web", 2)
        assert shared.counts == {"questions-day": (0, 5)}
        with pytest.raises(QuotaExceeded):
            await quotas.charge("web")

    asyncio.run(scenario())


def test_what_is_owed_is_kept_until_redis_has_taken_it() -> None:
    async def scenario() -> None:
        quotas, shared = five_a_day()
        await quotas.charge("web", 3)
        for _ in range(3):
            await give_back(quotas, shared, 2, was_up=True, is_up=False)
            shared.is_up = True
            caller = asyncio.create_task(quotas.charge("web"))
            await asyncio.sleep(0)
            caller.cancel()  # while it is given back: he has gone
            await asyncio.gather(caller, return_exceptions=True)
        await quotas.charge("web")
        assert shared.counts == {"questions-day": (0, 4)}

    asyncio.run(scenario())


def test_what_is_owed_under_a_callers_other_key_is_given_back_too() -> None:
    async def scenario() -> None:
        quotas, shared = five_a_day()
        quotas.open(web(questions_per_minute=5))
        with contextlib.suppress(Overloaded):
            async with quotas.charged("web"):
                quotas.open(web(questions_per_day=5))
                await give_back(quotas, shared, 5, was_up=True, is_up=False)
                shared.is_up = True
                raise Overloaded("none")
        assert shared.counts == {"questions-day": (0, 0), "questions-minute": (16, 0)}
        assert '"questions-minute";r=5;' in quotas.headers(web(questions_per_minute=5))["ratelimit"]

    asyncio.run(scenario())


def test_nobody_asks_for_nothing_because_redis_has_forgotten_what_is_owed() -> None:
    async def scenario() -> None:
        quotas, shared = five_a_day()
        await give_back(quotas, shared, 5, was_up=True, is_up=False)
        shared.is_up = True
        shared.counts.clear()
        await quotas.charge("web", 4)
        assert shared.counts == {"questions-day": (0, 4)}

    asyncio.run(scenario())


def test_what_is_owed_ends_with_its_window() -> None:
    async def scenario() -> None:
        quotas, shared = five_a_day()
        await give_back(quotas, shared, 4, was_up=True, is_up=False)
        shared.is_up = True
        shared.clock.advance(86_400)
        shared.counts["questions-day"] = (1, 3)  # by another replica
        await quotas.charge("web", 2)
        assert shared.counts == {"questions-day": (1, 5)}

    asyncio.run(scenario())


def test_what_is_owed_adds_up_within_its_window() -> None:
    account = _Account(())
    for cost, now, owed in ((2, 0, 2), (3, 86_399, 5), (1, 86_400, 1)):
        account.owe([(DAY, cost)], now)
        assert account.owed == {DAY.name: (DAY, now // 86_400, owed)}


def test_who_asks_for_more_than_is_left_or_ever_granted_is_counted_as_refused() -> None:
    quotas, want_of_quota = Quotas(None, ManualClock(1000.0)), refused("endpoint", "quota")
    quotas.open(web(questions_per_day=3))
    before = want_of_quota._value.get()
    for n_questions in (2, 2, 4):
        with contextlib.suppress(QuotaExceeded, InvalidRequest):
            asyncio.run(quotas.charge("web", n_questions))
    assert want_of_quota._value.get() == before + 2


def test_what_is_left_is_told_as_of_now_and_not_of_the_last_question() -> None:
    async def scenario() -> None:
        clock = ManualClock(1000.5)  # 40 s into a minute
        quotas = Quotas(None, clock)
        identity = web(questions_per_minute=3, questions_per_day=5)
        quotas.open(identity)
        assert quotas.headers(identity) == {}
        await quotas.charge("web", 2)
        told = []
        for _ in range(3):
            told.append(quotas.headers(identity)["ratelimit"])
            clock.advance(15)
        assert told == [
            '"questions-minute";r=1;t=20, "questions-day";r=3;t=85400',
            '"questions-minute";r=1;t=5, "questions-day";r=3;t=85385',
            '"questions-minute";r=3;t=50, "questions-day";r=3;t=85370',
        ]

    asyncio.run(scenario())


def test_everyone_is_told_of_the_limits_of_the_key_he_came_with_whichever_came_last() -> None:
    async def scenario() -> None:
        quotas, _ = five_a_day()
        await quotas.charge("web", 2)
        for latest in (web(), web(questions_per_day=5)):
            quotas.open(latest)
            assert quotas.headers(web()) == {}
            assert "r=3;" in quotas.headers(web(questions_per_day=5))["ratelimit"]

    asyncio.run(scenario())


def test_no_more_is_given_back_than_this_window_has() -> None:
    counts = {"questions-minute": (0, 3), "questions-day": (0, 3)}
    taken = take(counts, ((MINUTE, -2), (DAY, -2)), 60)
    assert taken.used == (0, 1)


def test_limits_without_keys_are_refused_for_there_is_nobody_to_limit() -> None:
    with pytest.raises(InvalidConfig, match="limits are of callers"):
        parse({"access": {"limits": {"questions_per_day": 1}}})


# --- at the endpoint


@pytest.fixture
def limited(tmp_path: Path) -> tuple[Gate, dict[str, str]]:
    """A gate, and two keys of one caller: three questions a day, and 50 tokens."""
    book, keys = KeyFileBook(tmp_path / "keys"), []
    for _ in range(2):
        limits = Limits(questions_per_day=3, tokens_per_day=50)
        key, record = mint("web", 0.0, [Scope.ASK, Scope.RETRIEVE], limits=limits)
        book.put(lambda _, record=record: record)  # type: ignore[misc]
        keys.append(key)
    return Gate(KeyFile(tmp_path / "keys", 60.0), Limits()), bearer(keys[0]) | {"x-other": keys[1]}


def test_answers_cost_questions_and_tokens_and_both_protocols_say_what_is_left(
    limited: tuple[Gate, dict[str, str]],
) -> None:
    gate, sent = limited
    under_test = service()
    under_test._quotas = gate.quotas
    body: dict[str, Any] = {"question": "who", "max_new_tokens": 16}

    def left(text: str) -> list[str]:
        return [part.split(";")[1] for part in text.split(", ")]

    first = ask(gate, "POST", "/v1/answer", sent, under_test, json=body)
    assert first.headers["ratelimit-policy"].startswith('"questions-day";q=3;w=86400, "tokens-day";q=50')
    assert left(first.headers["ratelimit"]) == ["r=2", "r=34"]
    refused = ask(gate, "POST", "/v1/answer", sent, under_test, json=body | {"question": ""})
    assert (refused.status_code, left(refused.headers["ratelimit"])) == (400, ["r=1", "r=18"])
    found = ask(gate, "POST", "/v1/retrieve", bearer(sent["x-other"]), under_test, json={"question": "who"})
    assert left(found.headers["ratelimit"]) == ["r=0", "r=18"]

    over = ask(gate, "POST", "/v1/answer/stream", sent, under_test, json=body)
    assert over.status_code == 429
    assert 0 < int(over.headers["retry-after"]) <= 86_400
    assert left(over.headers["ratelimit"]) == ["r=0", "r=18"]
    data, context = answer_pb2.AnswerRequest(**body).SerializeToString(), GrpcContext(**bearer(sent["x-other"]))
    asyncio.run(AnswerIngress(under_test, gate).Answer(data, context))
    assert "3 of 3 questions a day are used" in context.details
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert left(context.trailing["ratelimit"]) == ["r=0", "r=18"]
    assert int(context.trailing["retry-after"]) > 0
    assert context.trailing["grpc-retry-pushback-ms"] == "-1"  # nor will gRPC try again by itself


@pytest.mark.parametrize("proxy", ["haproxy", "python"])
def test_a_refused_stream_over_grpc_says_never_to_try_again(
    proxy: str, limited: tuple[Gate, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a generator that raises Serve keeps code and details alone; of one that ends its Python proxy keeps none."""
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", str(int(proxy == "haproxy")))
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "openbook-haproxy")
    gate, sent = limited
    under_test = service()
    under_test._quotas = gate.quotas
    ingress = AnswerIngress(under_test, gate)
    data = answer_pb2.AnswerRequest(question="who", max_new_tokens=16, n_answers=2).SerializeToString()

    async def stream(context: Any) -> list[answer_pb2.AnswerEvent]:
        return [event async for event in ingress.AnswerStream(data, context)]

    first, second = (GrpcContext(authorization=sent["authorization"]) for _ in range(2))
    assert asyncio.run(stream(first))[-1].HasField("answer")
    assert first.code is None
    if proxy == "haproxy":
        assert asyncio.run(stream(second)) == []
        assert second.trailing["grpc-retry-pushback-ms"] == "-1"
        assert int(second.trailing["retry-after"]) > 0
    else:
        with pytest.raises(QuotaExceeded):
            asyncio.run(stream(second))
    assert second.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "32 of 50 tokens a day are used" in second.details


def test_over_grpc_an_answer_too_says_what_is_left(limited: tuple[Gate, dict[str, str]]) -> None:
    gate, sent = limited
    under_test = service()
    under_test._quotas = gate.quotas
    context = GrpcContext(authorization=sent["authorization"])
    data = answer_pb2.AnswerRequest(question="who", max_new_tokens=16).SerializeToString()
    assert asyncio.run(AnswerIngress(under_test, gate).Answer(data, context)).answer
    assert context.trailing["ratelimit"].startswith('"questions-day";r=2;t=')
    assert context.trailing["ratelimit-policy"].startswith('"questions-day";q=3;w=86400')


def test_who_gets_no_place_is_charged_nothing(limited: tuple[Gate, dict[str, str]]) -> None:
    gate, sent = limited
    full = service(parse({"serving": {"max_in_flight": 1}}))
    full._quotas = gate.quotas
    full._admission._n_of["somebody"] = 1
    for _ in range(5):
        response = ask(gate, "POST", "/v1/retrieve", sent, full, json={"question": "who"})
        assert (response.status_code, "in flight" in response.text) == (429, True)
    full._admission._n_of.clear()
    assert ask(gate, "POST", "/v1/retrieve", sent, full, json={"question": "who"}).is_success


@pytest.mark.parametrize("path", ["/v1/retrieve", "/v1/answer", "/v1/answer/stream"])
def test_who_is_refused_for_want_of_a_shard_is_charged_nothing(limited: tuple[Gate, dict[str, str]], path: str) -> None:
    gate, sent = limited
    without = service(missing_shards=(1,))
    without._quotas = gate.quotas
    for _ in range(5):
        response = ask(gate, "POST", path, sent, without, json={"question": "who"})
        assert response.status_code == 503
        assert 'questions-day";r=3' in response.headers["ratelimit"]
