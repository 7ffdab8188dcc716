"""Users of openbook over HTTP for locust, for those who have locust's habits, pages or workers already.

    pip install locust && locust -f examples/locustfile.py --host http://127.0.0.1:8000 --headless -u 4 -t 30s

Locust is a CLOSED loop: each user waits for the answer before it asks again. So a stalled endpoint is asked less, and
the questions that would have waited are in no percentile; the rate is what came of it, not what was meant. To judge an
endpoint use `openbook loadtest`, which asks on a schedule whatever becomes of the answers (docs/loadtest.md).
"""

from typing import Any

from locust import HttpUser, between, task  # type: ignore[import-not-found,unused-ignore]

TIMEOUT_S = 10.0
QUESTIONS = ("who invented the telephone?", "Where was Marie Curie born?", "Which NFL team won Super Bowl 50?")


class Reader(HttpUser):  # type: ignore[misc,unused-ignore]
    """Asks in turn, and thinks for a second or two about each answer."""

    wait_time = between(1, 2)
    n_asked = 0

    @task
    def ask(self) -> None:
        """One question; what is no answer counts as locust's failure."""
        question = QUESTIONS[self.n_asked % len(QUESTIONS)]
        self.n_asked += 1
        body: dict[str, Any] = {"question": question, "timeout_s": TIMEOUT_S}
        with self.client.post("/v1/answer", json=body, timeout=TIMEOUT_S + 1, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text[:200]}")
