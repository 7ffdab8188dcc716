"""Our answers beside those of transformers, where it is right, under every combination of settings.

`make identity` asks as many questions as one likes.
"""

from identity import SETTINGS, Verdict, verdicts

BATCH = 2
N_QUESTIONS = len(SETTINGS) * BATCH


def _named(found: list[Verdict]) -> list[str]:
    return [f"{v.question}: {v.ours.token_ids}, {v.alone.token_ids}, {v.theirs}, gap {v.gap:.3g}" for v in found]


def test_answers_agree_with_transformers_whatever_else_is_in_the_batch() -> None:
    asked = list(verdicts(N_QUESTIONS, batch=BATCH))
    assert not _named([v for v in asked if not v.agrees])
    assert not _named([v for v in asked if not v.stable])
    assert {v.k for v in asked} == set(range(1, 51))
    assert len({v.ours.token_ids for v in asked}) > N_QUESTIONS // 4, (
        "the contexts decide, so agreement means something"
    )
