"""Which examples are in which batch."""

from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.training.batches import micro_batches


@st.composite
def plans(draw: st.DrawFn) -> dict[str, int]:
    size, n_micro_batches = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return {
        "n_examples": draw(st.integers(1, 40)),
        "batch_size": size * n_micro_batches,
        "size": size,
        "seed": draw(st.integers(0, 3)),
    }


def positions(step: int, plan: dict[str, int]) -> list[int]:
    return [i for batch in micro_batches(step, **plan) for i in batch.examples]


@settings(max_examples=60)
@given(plans())
def test_every_epoch_is_a_permutation_and_batches_lose_nothing(plan: dict[str, int]) -> None:
    n, n_epochs = plan["n_examples"], 3
    seen = [i for step in range(-(-n_epochs * n // plan["batch_size"])) for i in positions(step, plan)]
    for epoch in range(n_epochs):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))


@settings(max_examples=60)
@given(plans(), st.integers(0, 10), st.data())
def test_workers_share_the_micro_batches_of_one(plan: dict[str, int], step: int, data: st.DataObject) -> None:
    alone = micro_batches(step, **plan)
    assert [batch.number for batch in alone] == list(range(plan["batch_size"] // plan["size"]))
    assert {len(batch.examples) for batch in alone} == {plan["size"]}
    n_workers = data.draw(st.sampled_from([n for n in range(1, len(alone) + 1) if len(alone) % n == 0]))
    shares = [micro_batches(step, **plan, rank=rank, n_workers=n_workers) for rank in range(n_workers)]
    assert [batch for share in shares for batch in share] == alone
    assert len({len(share) for share in shares}) == 1


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(step: int, seed: int) -> list[int]:
        return positions(step, {"n_examples": 50, "batch_size": 50, "size": 10, "seed": seed})

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(step, seed)) for step in range(3) for seed in range(3)}) == 9
