"""How much a caller may ask for: windows of a minute and of a day that begin with the clock, and what is left. No I/O.

A window counts what was asked for in it, and begins anew at zero: at most twice a limit falls into any span as long as
its window. Tokens count as asked for (max_new_tokens), not as made: so a refusal comes before any work, and nothing is
to be settled with callers who have gone.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from openbook.config import Limits
from openbook.errors import InvalidRequest, QuotaExceeded

UNITS = ("questions", "tokens")
WINDOWS_S = {"minute": 60, "day": 86_400}
"""A day is one of UTC."""

Counts = MutableMapping[str, tuple[int, int]]
"""Of one caller, by policy: the number of the window, and what was asked for in it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One limit."""

    unit: str  # questions or tokens
    window: str  # minute or day
    limit: int

    @property
    def name(self) -> str:
        """As headers and counters call it."""
        return f"{self.unit}-{self.window}"

    @property
    def window_s(self) -> int:
        """How long a window is."""
        return WINDOWS_S[self.window]


Asked = Sequence[tuple[Policy, int]]
"""Policies, each with what a request costs under it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of asking: all of it granted and counted, or nothing."""

    granted: bool
    now: int  # seconds since 1970, by the clock of who counted
    used: tuple[int, ...]  # under each policy, with what was granted


@dataclass(frozen=True, slots=True)
class Standing:
    """What is left under a policy, and for how long."""

    policy: Policy
    left: int
    reset_s: int


def policies_of(limits: Limits) -> tuple[Policy, ...]:
    """Those that are set."""
    given = ((unit, window, getattr(limits, f"{unit}_per_{window}")) for unit in UNITS for window in WINDOWS_S)
    return tuple(Policy(unit, window, limit) for unit, window, limit in given if limit is not None)


def priced(policies: Sequence[Policy], n_questions: int, n_tokens: int) -> Asked:
    """What so much costs under each policy.

    Raises:
        InvalidRequest: it is more than a window ever grants.
    """
    asked = [(policy, n_questions if policy.unit == "questions" else n_tokens) for policy in policies]
    for policy, cost in asked:
        if cost > policy.limit:
            raise InvalidRequest(
                f"one request may ask for at most {policy.limit} {policy.unit}, which is what its caller may ask for "
                f"in a {policy.window}, got {cost}"
            )
    return asked


def take(counts: Counts, asked: Asked, now: int) -> Taken:
    """Count what is asked for if no limit is in the way. A cost below 0 is given back, as far as this window has it.

    `counters.SCRIPT` is the same in Lua.
    """
    used = [_used(counts, policy, now) for policy, _ in asked]
    granted = not any(
        cost > 0 and so_far + cost > policy.limit for (policy, cost), so_far in zip(asked, used, strict=True)
    )
    if granted:
        add(counts, asked, now)
        used = [_used(counts, policy, now) for policy, _ in asked]
    return Taken(granted, now, tuple(used))


def add(counts: Counts, asked: Asked, now: int) -> None:
    """Count what was granted elsewhere."""
    for policy, cost in asked:
        counts[policy.name] = now // policy.window_s, max(0, _used(counts, policy, now) + cost)


def standings(asked: Asked, taken: Taken, passed_s: int = 0) -> tuple[Standing, ...]:
    """How things stand afterwards, or so much later."""
    now = taken.now + passed_s

    def standing(policy: Policy, used: int) -> Standing:
        is_over = now // policy.window_s != taken.now // policy.window_s
        left = policy.limit if is_over else max(0, policy.limit - used)
        return Standing(policy, left, policy.window_s - now % policy.window_s)

    return tuple(standing(policy, used) for (policy, _), used in zip(asked, taken.used, strict=True))


def refusal(asked: Asked, taken: Taken) -> QuotaExceeded:
    """Why it was not granted, and when it may be."""
    stand = standings(asked, taken)
    short = [(each, cost) for each, (_, cost) in zip(stand, asked, strict=True) if cost > each.left]
    last, cost = max(short, key=lambda pair: pair[0].reset_s)
    policy = last.policy
    return QuotaExceeded(
        f"{policy.limit - last.left} of {policy.limit} {policy.unit} a {policy.window} are used, and {cost} more are "
        f"asked for: the next {policy.window} begins in {last.reset_s} s",
        float(last.reset_s),
    )


def headers(stand: Sequence[Standing]) -> dict[str, str]:
    """As in draft-ietf-httpapi-ratelimit-headers, by lower-case name; none where there is no limit."""
    if not stand:
        return {}
    policies = (
        f'"{each.policy.name}";q={each.policy.limit};w={each.policy.window_s}'
        + (';qu="tokens"' if each.policy.unit == "tokens" else "")
        for each in stand
    )
    left = (f'"{each.policy.name}";r={each.left};t={each.reset_s}' for each in stand)
    return {"ratelimit-policy": ", ".join(policies), "ratelimit": ", ".join(left)}


def _used(counts: Counts, policy: Policy, now: int) -> int:
    window, used = counts.get(policy.name, (0, 0))
    return used if window == now // policy.window_s else 0
