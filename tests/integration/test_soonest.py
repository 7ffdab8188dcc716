"""Which of two ingresses is asked by HAProxy as we mend it: the one that says that it will be done first."""

import asyncio
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest
from behind import Behind, behind_haproxy
from proxies import until
from test_ingress_silent import Callers

from openbook.serving.launch.tls import tell


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Behind]:
    with behind_haproxy(tmp_path) as found:
        yield found


def say(behind: Behind, *loads: str) -> None:
    """Seconds until all is done, and for one question more, of each ingress."""
    for (port, _), load in zip(behind.ports, loads, strict=True):
        httpx.put(f"http://127.0.0.1:{port}/load", content=load).raise_for_status()


def asked(behind: Behind, n: int = 10) -> list[int]:
    """The numbers of those that answer so many questions at once over each protocol."""

    async def scenario() -> set[str]:
        them = Callers(behind)
        try:
            return await them.ask(n=n)
        finally:
            await them.close()

    pids = [str(process.pid) for process in behind.ingresses]
    return sorted(pids.index(answer) for answer in asyncio.run(scenario()))


def test_who_is_done_first_is_asked(behind: Behind) -> None:
    say(behind, "5.0 0.0", "0.5 0.0")
    until(lambda: asked(behind) == [1])
    assert asked(behind, 50) == [1]
    say(behind, "0.1 0.0", "0.5 0.0")
    until(lambda: asked(behind) == [0])
    assert asked(behind, 50) == [0]


def test_what_is_sent_to_one_counts_before_it_says_so(behind: Behind) -> None:
    say(behind, "0.0 0.0", "3.0 1.0")
    until(lambda: asked(behind) == [0])
    say(behind, "0.0 1.0", "3.0 1.0")
    until(lambda: asked(behind, 20) == [0, 1])


def test_who_asks_for_little_does_not_wait_for_himself_where_all_have_much_to_do(behind: Behind) -> None:
    """As he does not wait for the others."""
    numbers, callers = {str(process.pid): i for i, process in enumerate(behind.ingresses)}, count()

    def asks(caller: str) -> int:
        url, headers = f"http://127.0.0.1:{behind.http}/Ingress/Ask", {"x-caller": caller}
        return numbers[httpx.post(url, content=b"who", headers=headers).raise_for_status().text]

    say(behind, "50.0 9.0", "100.0 9.0")
    until(lambda: [asks(f"new {next(callers)}") for _ in range(5)] == [0] * 5)
    assert [asks("one"), asks("one"), asks("other"), asks("one")] == [0, 1, 0, 0]
    say(behind, "0.0 9.0", "100.0 9.0")
    until(lambda: [asks("one") for _ in range(3)] == [0] * 3)


def test_who_does_not_say_is_not_asked_and_where_nobody_says_all_are(behind: Behind) -> None:
    say(behind, "5.0 1.0", "")
    until(lambda: asked(behind) == [0])
    say(behind, "", "about 1.0")
    until(lambda: asked(behind) == [0, 1])


def test_who_says_nothing_for_a_while_is_passed_by_until_he_does(behind: Behind) -> None:
    say(behind, "0.0 0.0", "5.0 0.0")
    until(lambda: asked(behind) == [0])
    behind.ingresses[0].send_signal(signal.SIGSTOP)
    until(lambda: asked(behind) == [1])
    behind.ingresses[0].send_signal(signal.SIGCONT)
    until(lambda: asked(behind) == [0])


def test_callers_do_not_hear_how_busy_anybody_is(behind: Behind) -> None:
    say(behind, "0.0 0.0", "0.0 0.0")
    assert httpx.get(f"http://127.0.0.1:{behind.ports[0][0]}/-/load").text == "0.0 0.0"
    for path in ("/-/load", "/%2d/load?x", "/-/%6Coad"):
        reply = httpx.get(f"http://127.0.0.1:{behind.http}{path}")
        assert (reply.status_code, reply.json()["code"]) == (404, "NOT_FOUND"), path


def test_who_measures_may_have_two_drawn(behind: Behind) -> None:
    say(behind, "0.0 0.0", "5.0 0.0")
    until(lambda: asked(behind) == [0])
    tell(behind.folder / "admin.sock", "experimental-mode on; set var proc.drawn bool(true)\n")
    assert asked(behind) == [0, 1]
