"""What `openbook loadtest` is told."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from openbook.config import Positive, Seconds, Section
from openbook.core.types import Decoding, Formulation
from openbook.loadtest.kinds import Arrivals, Check, What

MAX_QUESTIONS = 5_000_000
"""In one run: each is kept, in about a hundred bytes, until the end."""

GRACE_S = 1.0
"""How long after its deadline an outcome is waited for. What has none by then hangs."""

ON_TIME_S = 0.05
"""A question is sent on time if it is sent no later than this after its intended time."""

MIN_ON_TIME = 0.99
"""Share of questions sent on time below which the load generator, not the endpoint, was measured."""


Whole32 = Annotated[int, Field(ge=1, lt=1 << 32)]  # as answer.proto holds it


class LoadSettings(Section):
    """One run: what is asked of whom, how often, for how long."""

    address: str  # host:port speaks gRPC; http://host:port HTTP; grpcs://host:port and https://host:port with TLS
    tls_ca: Path | None = None  # who signed the endpoint's certificate, in PEM; else whom this machine trusts
    what: What = What.ANSWER
    rate: Annotated[float, Field(gt=0, le=1e6)] = 1.0  # questions a second, intended
    closed: Positive | None = None  # in place of a rate: so many callers, each of whom asks again once answered
    arrivals: Arrivals = Arrivals.POISSON  # how the intended times are spread
    cv: Annotated[float, Field(ge=0.001, le=100)] = 2.0  # coefficient of variation of gamma's gaps; poisson has 1
    duration_s: Seconds = 30.0  # the window that is measured
    warm_up_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0  # before it; told apart, and not counted
    questions: Path | None = None  # one a line, or JSON lines; with none, about the embedded corpus
    zipf: Annotated[float, Field(ge=0, le=10)] = (
        1.0  # the file's n-th question is asked n^-zipf times as often; 0: all alike
    )
    replay: bool = False  # in the order of the file, again and again, in place of drawing
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0  # equal seeds give equal times and equal questions
    caller: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = (
        None  # who asks: x-caller; endpoints may share by it
    )
    timeout_s: Seconds = 10.0  # the deadline stated in each request; an answer within it is a good one
    k: Whole32 | None = None
    formulation: Formulation | None = None
    decoding: Decoding | None = None
    n_beams: Whole32 | None = None
    max_new_tokens: Whole32 | None = None
    check: Check | None = None  # equal questions must get equal texts and passages; or scores too
    processes: Positive = 1  # that send; each takes its share of the schedule
    connections: Positive = 16  # over gRPC, for each process; over HTTP as many as it takes
    max_in_flight: Positive = 20_000  # for each process; beyond it questions are not sent, and the run is an error

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if "@" in address:  # settings are shown, and kept with the results
            raise ValueError("must name neither user nor password: a key is taken from OPENBOOK_API_KEY")
        parts = urlsplit(address if "://" in address else f"grpc://{address}")
        try:
            known = parts.scheme in ("grpc", "grpcs", "http", "https") and bool(parts.hostname and parts.port)
        except ValueError:  # a port that is no number
            known = False
        if not known or parts.path.strip("/") or set("?#") & set(address):
            raise ValueError(
                f"must be host:port (gRPC) or http://host:port, with TLS grpcs:// or https://, got {address!r}"
            )
        return address.removeprefix("grpc://").rstrip("/")

    @model_validator(mode="after")
    def _can_be_run(self) -> "LoadSettings":
        if self.closed is None and self.rate * self.length_s > MAX_QUESTIONS:
            asked = f"{self.rate:g} a second for {self.length_s:g} s"
            raise ValueError(f"a run has at most {MAX_QUESTIONS:,} questions, got {asked}")
        if self.closed is None and self.rate * self.duration_s < 1:
            asked = f"{self.rate:g} a second for {self.duration_s:g} s"
            raise ValueError(f"a run has at least one question within duration_s, got {asked}")
        if self.closed is not None and self.processes > self.closed:
            raise ValueError(f"processes must be at most closed = {self.closed}, got {self.processes}")
        if self.tls_ca is not None and not self.is_tls:
            raise ValueError(f"tls_ca needs an address of grpcs:// or https://, got {self.address}")
        return self

    @property
    def length_s(self) -> float:
        """Warm-up and window."""
        return self.warm_up_s + self.duration_s

    @property
    def is_http(self) -> bool:
        """Whether the address is one of HTTP."""
        return self.address.startswith(("http://", "https://"))

    @property
    def is_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.address.startswith(("grpcs://", "https://"))
