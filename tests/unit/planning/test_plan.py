"""Plans: never less for more, enough for what is asked, and sizes that a real tier has."""

import asyncio
import json
from dataclasses import replace
from io import StringIO
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import parse, section
from openbook.deployment import render
from openbook.errors import InvalidConfig, InvalidRequest, ShardUnavailable, StartupError
from openbook.planning import calibrate, screen
from openbook.planning.constants import DEFAULTS, Calibration, calibrated, constants
from openbook.planning.demand import Demand, Machine, Machines, machines
from openbook.planning.measure import WORDS, Served, _ask, build, generated, served
from openbook.planning.model import Shape, memory, sizes, times
from openbook.planning.plan import GB, INDICES, IndexTier, everything_held, index_tier, plan, recall_of
from openbook.planning.topology import text
from openbook.planning.topology import topology as planned_topology
from openbook.serving.access.exposure import check_exposure

SAMPLE = Path(__file__).parents[3] / "deploy" / "topology.yaml"
OFFERED = machines()
WITHOUT_GPUS = tuple(machine for machine in OFFERED.machines if not machine.gpus)
EXAMPLES = 25
HUGE = Machines(
    machines=(
        *OFFERED.machines,
        Machine(name="huge", cores=256, memory_gb=100_000, disk_gb=1e6, price=1000),
    )
)
KNOWN = Machine(name="m", cores=8, memory_gb=64, disk_gb=500, price=1)
DOUBLED = Demand(passages=500_000, index="Flat", questions_per_s=10, growth=1, p99_s=400)
"""At the end a million passages and 20 questions a second, which one index machine and two of the endpoint answer."""
NUMBERS = st.integers(1000, 50_000_000)
SHAPES = st.builds(
    Shape,
    n_passages=NUMBERS,
    dimension=st.sampled_from([64, 384, 768, 1024]),
    index=st.sampled_from(INDICES),
    n_shards=st.sampled_from([1, 2, 4, 8]),
    n_words=st.floats(10, 300),
    exact_bytes=st.sampled_from([2, 4]),
    has_origins=st.booleans(),
    has_words=st.booleans(),
)
DEMANDS = st.builds(
    Demand,
    passages=NUMBERS,
    dimension=st.sampled_from([384, 768]),
    index=st.sampled_from([None, *INDICES]),
    recall=st.sampled_from([0.5, 0.9, 0.96]),
    questions_per_s=st.floats(0.1, 500),
    growth=st.floats(0, 2),
    years=st.floats(0, 5),
    failures=st.integers(0, 3),
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(SHAPES, st.integers(1, 10_000_000), st.integers(1, 500))
def test_more_passages_or_numbers_need_more_of_everything(shape: Shape, more: int, longer: int) -> None:
    for larger in (shape.of(shape.n_passages + more), replace(shape, dimension=shape.dimension + longer)):
        for c in (DEFAULTS,):
            assert sizes(larger, c).snapshot > sizes(shape, c).snapshot
            assert memory(larger, c).needed > memory(shape, c).needed
            assert memory(larger, c).wanted > memory(shape, c).wanted


@settings(max_examples=EXAMPLES, deadline=None)
@given(SHAPES, st.integers(2, 20))
def test_a_search_of_more_passages_takes_no_less_time(shape: Shape, many: int) -> None:
    named = replace(shape, index=shape.factory)  # as many cells
    before, after = times(named, DEFAULTS), times(named.of(shape.n_passages * many), DEFAULTS)
    assert after.alone >= before.alone
    assert after.server_cpu >= before.server_cpu


@settings(max_examples=EXAMPLES, deadline=None)
@given(SHAPES)
def test_shards_cost_memory_and_save_time_of_a_scan(shape: Shape) -> None:
    more = replace(shape, index=shape.factory, n_shards=2 * shape.n_shards)
    shape = replace(shape, index=shape.factory)
    assert memory(more, DEFAULTS).needed >= memory(shape, DEFAULTS).needed - shape.n_shards * 35e6  # BLAS's buffers
    scan = dict(DEFAULTS) | {"shard_s": replace(DEFAULTS["shard_s"], value=0.0)}
    assert times(more, scan).alone <= times(shape, scan).alone
    assert times(more, DEFAULTS).client_cpu > times(shape, DEFAULTS).client_cpu


@settings(max_examples=EXAMPLES, deadline=None)
@given(DEMANDS)
@example(Demand(passages=500_000_000, dimension=768))  # spread over machines, each with all of the index of words
@example(Demand(passages=5_000_000, index="Flat", p99_s=0.84))  # in more shards than machines of one have cores
def test_what_is_planned_is_enough(demand: Demand) -> None:
    found = plan(demand, HUGE, DEFAULTS)
    index, wanted = found.index, demand.questions_per_s * demand.grown
    assert found.recall >= demand.recall
    assert index.rate >= wanted * 0.999
    assert found.endpoint.rate >= wanted * 0.999
    assert index.shape.n_passages >= demand.passages * demand.grown
    share = index.shards_each / index.shape.n_shards
    assert memory(index.shape, DEFAULTS).needed * share <= index.machine.memory_gb * GB
    words = index.sizes.words  # which every machine has whole
    assert ((index.sizes.snapshot - words) * share + words) * 2 <= index.machine.disk_gb * GB
    assert index.machines * index.shards_each >= index.replicas * index.shape.n_shards
    assert index.shards_each <= index.machine.cores, "all are searched at once"
    assert index.replicas > demand.failures
    assert found.endpoint.machines > demand.failures
    assert [each.times for each in found.breaks] == sorted(each.times for each in found.breaks)
    disk_and_memory = [each.times for each in found.breaks if "index" in each.what and "all" not in each.what]
    assert min(disk_and_memory) >= 0.98 * demand.grown  # nothing breaks before the end


def test_a_plan_is_what_its_numbers_say() -> None:
    """By hand, from the constants."""
    found = plan(DOUBLED, Machines(machines=(KNOWN,)), DEFAULTS)
    generate_s, other_s = 2 / 4.27, 1 / 172 + 0.013
    of_one = 8 * 0.7 / (generate_s + other_s)
    index, endpoint = found.index, found.endpoint
    assert (index.machines, index.price, endpoint.machines, endpoint.price) == (1 + 1, 2, 2 + 1, 3)
    assert found.price_a_month == 5 * 730
    assert (endpoint.answer_s, endpoint.rate) == pytest.approx((generate_s / 2 + other_s, 2 * of_one))
    index_bytes, texts, words, origins = 384 * 4, 6.29 * 100 + 39 + 24, 52 * 8, 32 + 48 / 2  # of a passage
    room, vocabulary = 57.6e9 - 135e6, 1.3e6
    assert [each.times for each in found.breaks] == pytest.approx(
        [
            2 * of_one / 10,
            11.26,  # x, where 10 x searches a second of 500,000 x passages take 0.7 of 8 cores
            (room - vocabulary) / (index_bytes + texts + words) / 500_000,
            room / index_bytes / 500_000,
            (225e9 - vocabulary) / (2 * index_bytes + texts + words + origins) / 500_000,
        ],
        rel=0.01,
    )
    server_s = 0.042e-3 + 500_000 * 11.26 * 384 * 0.023e-9
    assert 10 * 11.26 * server_s == pytest.approx(0.7 * 8, rel=0.01)
    large = sizes(Shape(1_000_000, 768, "IVF1024,SQ8", 2, exact_bytes=2), DEFAULTS)
    assert (large.index, large.exact) == (1e6 * (768 + 8) + 2 * 1024 * 768 * 4, 1e6 * 768 * 2)
    assert (large.texts, large.words, large.origins) == (1e6 * texts, 1e6 * words + vocabulary, 1e6 * origins)


@pytest.mark.parametrize(("gpus", "rate"), [(1, 50 * 4.27 / 2), (8, 8 / (1 / 172 + 0.013))])
def test_gpus_generate_as_many_answers_as_their_cores_encode_questions(gpus: int, rate: float) -> None:
    """Of one the generator is the slower, of eight the cores."""
    offered = Machines(machines=(KNOWN.model_copy(update={"gpus": gpus}),))
    found = plan(Demand(passages=1000), offered, DEFAULTS).endpoint
    assert (found.answer_s, found.rate) == pytest.approx((2 / 4.27 / 50 + 1 / 172 + 0.013, 0.7 * rate))


def test_every_machine_has_all_of_the_index_of_words() -> None:
    """However shards are spread."""
    demand = Demand(passages=500_000_000, dimension=768)
    index = (found := plan(demand, OFFERED, DEFAULTS)).index
    assert (index.shape.n_shards, index.shards_each) == (2, 1)
    assert everything_held(index) == index.memory.wanted + index.sizes.texts + 2 * index.sizes.words

    def taken(times_today: float) -> tuple[float, float]:
        """Memory with which nothing is read, and disk, of a machine."""
        shape = index.shape.of(ceil(demand.passages * times_today))
        of = sizes(shape, DEFAULTS)
        held = (memory(shape, DEFAULTS).wanted + of.texts) / 2 + of.words
        return held / GB, 2 * ((of.index + of.exact + of.texts + of.origins) / 2 + of.words) / GB

    machine = index.machine
    of_all, of_disk = (next(x.times for x in found.breaks if what in x.what) for what in ("words too", "disk of"))
    assert taken(of_all)[0] == pytest.approx(0.9 * machine.memory_gb, rel=0.01)
    assert taken(of_disk)[1] == pytest.approx(0.9 * machine.disk_gb, rel=0.01)
    for factor, suffices in ((1.001, True), (0.999, False)):
        other = machine.model_copy(update={"disk_gb": factor * taken(1)[1] / 0.9})
        assert (index_tier(demand, index.shape, other, DEFAULTS) is not None) == suffices


@settings(max_examples=EXAMPLES, deadline=None)
@given(DEMANDS)
@example(
    Demand(passages=240_000_000, dimension=768, index="IVF,RaBitQfs")
)  # three shards, on smaller machines than one
@example(Demand(passages=80_000_000, dimension=768, index="Flat", failures=0))  # five shards
def test_no_other_number_of_shards_is_cheaper(demand: Demand) -> None:
    found, n = plan(demand, HUGE, DEFAULTS).index, ceil(demand.passages * demand.grown)
    for index in (demand.index,) if demand.index else INDICES:
        for machine, shards in product(HUGE.machines, range(1, 65)):
            other = index_tier(demand, Shape(n, demand.dimension, index, shards, demand.words), machine, DEFAULTS)
            if other is None or recall_of(index)[0] < demand.recall:
                continue
            if other.times.alone * DEFAULTS["index_tail"].value <= demand.p99_s / 2:
                assert found.price <= other.price * 1.001


@settings(max_examples=EXAMPLES, deadline=None)
@given(DEMANDS, st.floats(1, 4))
def test_more_never_costs_less(demand: Demand, factor: float) -> None:
    price = plan(demand, HUGE, DEFAULTS).price_a_month
    for change in (
        {"questions_per_s": demand.questions_per_s * factor},
        {"failures": demand.failures + 1},
        {"growth": demand.growth * factor},
    ):
        assert plan(demand.model_copy(update=change), HUGE, DEFAULTS).price_a_month >= price * 0.999
    assert plan(demand.model_copy(update={"recall": 0.1}), HUGE, DEFAULTS).price_a_month <= price
    assert plan(demand, Machines(machines=HUGE.machines[::2]), DEFAULTS).price_a_month >= price


@settings(max_examples=EXAMPLES, deadline=None)
@given(DEMANDS)
def test_a_plan_is_a_topology_that_can_be_rendered(demand: Demand) -> None:
    values = yaml.safe_load(text(plan(demand, HUGE, DEFAULTS)))
    topology = section(render.Topology, "plan", **values)
    assert render.render(topology)
    check_exposure("what `openbook deploy serve` deploys", parse(topology.settings(has_gpus=False)).access)


@settings(max_examples=EXAMPLES, deadline=None)
@given(DEMANDS)
@example(Demand(passages=21_000_000, dimension=768, index="Flat", p99_s=1))  # 4.74 GB of 4.8
def test_a_server_gets_the_memory_that_it_needs(demand: Demand) -> None:
    found = plan(demand, HUGE, DEFAULTS)
    given = planned_topology(found).index.memory_gb * GB
    assert given * 1.001 > found.index.memory.needed / found.index.shape.n_shards
    assert given * found.index.shards_each <= 0.9 * found.index.machine.memory_gb * GB


def test_a_topology_says_what_was_planned() -> None:
    written = text(plan(DOUBLED, Machines(machines=(KNOWN,)), DEFAULTS))
    assert written.splitlines()[:2] == [
        "# What `openbook plan` found for 1000000 passages and 20 questions a second: 3,650 USD a month.",
        "# Index: 2 x m (Flat). Endpoint: 3 x m.",
    ]
    assert yaml.safe_load(written) == {
        "index": {"shards": 1, "threads": 8, "memory_gb": 57.6, "disk_gb": 500},
        "endpoint": {
            "settings": {
                "serving": {"topology": "split", "n_replicas": 3, "num_cpus": 1.0},
                "encoder": {"n_replicas": 3, "num_cpus": 1.0},
                "generator": {"n_replicas": 3, "n_threads": 8, "num_cpus": 6.0},
                "answer": {"timeout_s": 400.0, "max_timeout_s": 400.0},
                "access": {"keys": "redis"},
            },
            "min_workers": 3,
            "max_workers": 6,
            "cpus": 8,
            "memory_gb": 57,
        },
    }


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 32])
def test_a_generator_that_takes_all_cores_has_a_machine_of_its_own(cores: int) -> None:
    """Where one is lost, Serve would put its generator beside another one, and both would be half as fast."""
    machine = Machine(name="m", cores=cores, memory_gb=64, disk_gb=500, price=1)
    served = planned_topology(plan(Demand(passages=1000), Machines(machines=(machine,)), DEFAULTS)).served
    reserved = served.generator.num_cpus
    assert served.generator.n_threads == cores
    assert 2 * reserved > cores
    assert reserved + served.encoder.num_cpus + served.serving.num_cpus <= cores, "beside encoder and ingress"


def test_beside_gpus_every_replica_of_the_encoder_computes_alike() -> None:
    """Left to each, one would take a GPU that no other one sees, or another dtype: another encoder to those who ask."""
    machine = Machine(name="m", cores=8, memory_gb=64, disk_gb=500, price=1, gpus=1)
    planned = planned_topology(plan(Demand(passages=1000), Machines(machines=(machine,)), DEFAULTS))
    for topology in (planned, render.load(SAMPLE)):
        encoder = parse(topology.settings(has_gpus=True)).encoder
        assert (encoder.device, encoder.dtype) == ("cpu", "float32")


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("cores", [4, 32])
def test_each_gpu_of_a_machine_has_a_generator_and_its_machine_is_asked_for_with_all_of_them(
    gpus: int, cores: int
) -> None:
    machine = Machine(name="m", cores=cores, memory_gb=64, disk_gb=500, price=1, gpus=gpus)
    planned = plan(Demand(passages=1000), Machines(machines=(machine,)), DEFAULTS)
    samples = {name: getattr(render.load(SAMPLE), name) for name in ("gcp", "kubernetes")}
    topology = planned_topology(planned).model_copy(update=samples)
    served = parse(topology.settings(has_gpus=True))
    assert served.generator.n_replicas == gpus * planned.endpoint.machines
    reserved = gpus * served.generator.num_cpus + served.encoder.num_cpus + served.serving.num_cpus
    assert reserved <= cores, "all have room on one machine"
    files = render.render(topology)
    worker = yaml.safe_load(files["deploy/ray/gcp.yaml"])["available_node_types"]["worker"]
    assert worker["resources"]["GPU"] == worker["node_config"]["guestAccelerators"][0]["acceleratorCount"] == gpus
    overlay = yaml.safe_load(files["deploy/kubernetes/overlays/gpu/kustomization.yaml"])
    patches = yaml.safe_load(overlay["patches"][0]["patch"])
    assert [each["value"] for each in patches if each["path"].endswith("gpu")] == [str(gpus)] * 2


def test_what_cannot_be_met_is_said() -> None:
    with pytest.raises(InvalidRequest, match="no index machine suffices for 21000000 passages of 768 numbers"):
        plan(Demand(passages=21_000_000, dimension=768, recall=1.0, index="IVF,SQ8"), OFFERED, DEFAULTS)
    with pytest.raises(InvalidRequest, match=r"index must be Flat, HNSWn, .* got PQ8"):
        Shape(10, 4, "PQ8")
    slow = plan(
        Demand(passages=1000, p99_s=1, generator_parameters=1e9), Machines(machines=OFFERED.machines[:1]), DEFAULTS
    )
    assert any("none of these machines is fast enough" in each for each in slow.warnings)


@pytest.mark.parametrize(("passages", "p99_s", "shards"), [(1000, 0.0012, 1), (21_000_000, 0.1, 94)])
def test_where_no_search_is_in_time_the_fastest_is_planned(passages: int, p99_s: float, shards: int) -> None:
    """A shard of more scans less, and to ask one more takes longer than that."""
    demand = Demand(passages=passages, dimension=768, index="Flat", p99_s=p99_s)
    found = plan(demand, Machines(machines=(KNOWN, KNOWN.model_copy(update={"price": 2}))), DEFAULTS)
    assert (found.index.shape.n_shards, found.index.machine) == (shards, KNOWN)
    search_s, answer_s = (f"{each:.3f}" for each in (2.5 * found.index.times.alone, 3.1 * found.endpoint.answer_s))
    said = f"not {p99_s} s, {search_s} to search and {answer_s} to generate: none of these machines is fast enough"
    assert found.warnings[0].endswith(said)


def test_no_more_shards_are_tried_than_can_be_asked_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is in time that would be a thousand of each kind, for each limit."""
    tried: list[IndexTier | None] = []

    def count(*of_a_tier: Any) -> IndexTier | None:
        tried.append(index_tier(*of_a_tier))
        return tried[-1]

    monkeypatch.setattr("openbook.planning.plan.index_tier", count)
    plan(Demand(passages=1000, p99_s=0.0012), OFFERED, DEFAULTS)
    n_kinds = len(INDICES) * len(OFFERED.machines)
    assert len(tried) == 2 * n_kinds, "one shard for the limit, and for what is fastest: asking two takes longer"


def test_a_search_may_take_all_that_the_endpoint_leaves() -> None:
    """More than half."""
    found = plan(Demand(passages=500_000_000, dimension=768, index="Flat", p99_s=1), OFFERED, DEFAULTS)
    assert 0.5 < 2.5 * found.index.times.alone < found.p99_s <= 1
    assert not any("fast enough" in each for each in found.warnings)


@pytest.mark.parametrize(
    ("demand", "machine", "warnings"),
    [
        (DOUBLED, {}, []),
        (
            DOUBLED.model_copy(update={"failures": 0}),
            {"gpus": 1},
            ["gpu_times_core = 50 is assumed", "the loss of any machine"],
        ),
        (Demand(passages=21_000_000, dimension=768), {"memory_gb": 24}, ["92% of the exact vectors are read"]),
        (Demand(passages=50_000_000, index="Flat", p99_s=400), {}, ["no machine holds every shard: only Kubernetes"]),
    ],
)
def test_a_plan_warns_of_what_it_does_and_of_nothing_else(
    demand: Demand, machine: dict[str, Any], warnings: list[str]
) -> None:
    found = plan(demand, Machines(machines=(KNOWN.model_copy(update=machine),)), DEFAULTS).warnings
    assert len(found) == len(warnings)
    assert [said.startswith(begin) for said, begin in zip(found, warnings, strict=True)] == [True] * len(warnings)


def test_search_and_answer_together_are_in_time_where_machines_on_offer_are_fast_enough() -> None:
    """A tier of each kind that takes half of the time, or all of it, would be in time by itself."""
    for p99_s in (0.3, 0.5, 0.82, 0.9, 1.2):
        found = plan(Demand(passages=5_000_000, p99_s=p99_s), OFFERED, DEFAULTS)
        assert found.p99_s <= p99_s, found.endpoint.machine.name
        assert not any("fast enough" in each for each in found.warnings)
    for passages, p99_s, offered in product((1_000_000, 5_000_000), (0.84, 0.9, 1.0), (OFFERED.machines, WITHOUT_GPUS)):
        demand = Demand(passages=passages, p99_s=p99_s, index="Flat")
        found = plan(demand, Machines(machines=offered), DEFAULTS)
        shards = {1_000_000: {0.84: 3, 0.9: 2, 1.0: 1}, 5_000_000: {0.84: 14, 0.9: 6, 1.0: 4}}[passages][p99_s]
        assert found.p99_s <= p99_s
        assert found.index.shape.n_shards == shards
        assert found.index.price == pytest.approx(2 * 0.2 * ceil(shards / 4)), "a core each"
        assert found.endpoint.price == pytest.approx(0.4), found.endpoint.machine.name
    cheap, dear = (Machine(name=name, cores=4, memory_gb=16, disk_gb=200, price=p) for name, p in (("c", 1), ("d", 2)))
    for offered in ((cheap, dear), (dear, cheap)):  # none is in time, and both are as fast
        slow = plan(Demand(passages=1000, p99_s=0.1), Machines(machines=offered), DEFAULTS)
        assert (slow.endpoint.machine, any("fast enough" in each for each in slow.warnings)) == (cheap, True)


def test_wikipedia_on_one_machine_of_24_gb() -> None:
    one = Machine(name="one", cores=8, memory_gb=24, disk_gb=300, price=0.3)
    shape = Shape(21_000_000, 768, "IVF,SQ8")
    demand = Demand(passages=21_000_000, dimension=768, failures=0)
    found = index_tier(demand, shape, one, DEFAULTS)
    assert found is not None
    assert (found.machines, found.shape.factory) == (1, "IVF8192,SQ8")
    assert found.cached < 0.5  # the exact vectors are read from disk
    read_s = 40 * (1 - found.cached) * 0.9e-3 / 40
    assert found.times.alone == pytest.approx(times(shape, DEFAULTS).alone + read_s)
    for too_large in ("Flat", "HNSW32"):
        assert index_tier(demand, replace(shape, index=too_large), one, DEFAULTS) is None


def test_a_calibration_takes_the_place_of_what_it_measured(tmp_path: Path) -> None:
    found = calibrated(Calibration(machine="mine", date="2026-11-23", values={"call_s": 0.5}))
    assert (found["call_s"].value, found["call_s"].source) == (0.5, "calibrated: mine, 2026-11-23")
    assert found["flat_s"] is DEFAULTS["flat_s"]
    path = tmp_path / "c.yaml"
    path.write_text("machine: m\ndate: d\nvalues: {speed: 1}\n")
    with pytest.raises(InvalidConfig, match=r"c.yaml: values: unknown: speed"):
        constants(path)
    for wrong, shown in (("-1", "-1"), (".inf", "inf"), (".nan", "nan")):
        path.write_text(f"machine: m\ndate: d\nvalues: {{call_s: {wrong}}}\n")
        with pytest.raises(InvalidConfig, match=rf"c.yaml: values.call_s = {shown}"):
            constants(path)


def test_a_file_whose_keys_are_no_words_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for written, said in (("- a list", "must map keys to values"), ("1: 2", "keys must be words, got 1")):
        path.write_text(written)
        for read in (constants, machines, render.load):
            with pytest.raises(InvalidConfig, match=rf"c.yaml: {said}$"):
                read(path)


def test_what_is_wrong_with_machines_is_said_once_and_in_words_of_yaml(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    one = "{name: one, cores: 8, memory_gb: 24, disk_gb: 300}"
    for written, said in (
        (f"[{one}]", "machines.0.price: must be given"),
        (one, "machines: Input should be a valid list"),
        ("[]", "machines: list should have at least 1 item after validation, not 0"),
    ):
        path.write_text(f"machines: {written}\n")
        with pytest.raises(InvalidConfig) as refused:
            machines(path)
        assert str(refused.value) == f"{path}: {said}"


COSTS = st.fixed_dictionaries(
    {"call_s": st.floats(1e-5, 1e-2), "shard_s": st.floats(0, 1e-3), "call_cpu_s": st.floats(1e-6, 1e-3)}
    | {name: st.floats(1e-12, 1e-9) for name in ("flat_alone_s", "flat_s", "codes_alone_s", "codes_s")}
    | {name: st.floats(0, 1e-3) for name in ("cells_alone_s", "cells_s", "graph_step_alone_s", "graph_step_s")}
    | {name: st.floats(1e-9, 1e-7) for name in ("graph_alone_s", "graph_s")}
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(COSTS)
def test_a_calibration_finds_the_costs_that_made_its_times(costs: dict[str, float]) -> None:
    made = calibrated(Calibration(machine="m", date="d", values=costs))

    def measured(tier: calibrate.Tier) -> Served:
        shape = Shape(*tier)
        taken = times(shape, made)
        return Served(taken.alone, shape.n_shards / taken.server_cpu, taken.server_cpu, taken.client_cpu, 1, 10**8)

    found = calibrate._of_tiers({tier: measured(tier) for tier in calibrate.TIERS})
    assert found["server_bytes"] == 10**8 - 1000 * 16 * 4  # without the vectors of the first
    assert {name: found[name] for name in costs} == pytest.approx(costs, rel=1e-6, abs=1e-15)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.floats(1e-6, 1), min_size=7, max_size=7))
def test_whatever_was_measured_is_a_calibration(seconds: list[float]) -> None:
    found = {tier: Served(s, 1 / s, s, s, 1, 10**8) for tier, s in zip(calibrate.TIERS, seconds, strict=True)}
    calibrated(Calibration(machine="m", date="d", values=calibrate._of_tiers(found)))


def test_every_source_is_a_page_or_an_assumption() -> None:
    root = Path(__file__).parents[3]
    for constant in DEFAULTS.values():
        page, _, why = constant.source.partition(":")
        assert (root / page).exists() or page == "assumed", constant
        assert why or page != "assumed", constant


def test_the_command(tmp_path: Path) -> None:
    asked = ["plan", "--passages", "1000000", "--rate", "5", "--p99", "400"]
    shown = CliRunner().invoke(app, [*asked, "--topology", str(tmp_path / "t.yaml")])
    assert shown.exit_code == 0, shown.output
    for said in ("what breaks first", "what this rests on", "USD a month", "1,000,000 of 384 numbers"):
        assert said in shown.output
    topology = render.load(tmp_path / "t.yaml")
    assert (topology.index.replicas, topology.served.answer.timeout_s) == (2, 400)
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert found["assumptions"]["call_s"]["source"]
    assert found["index"]["machine"]["name"] in {machine.name for machine in OFFERED.machines}
    assert isinstance(CliRunner().invoke(app, ["plan"]).exception, InvalidRequest)


def test_a_topology_is_a_new_file(tmp_path: Path) -> None:
    """One that is there may say already where the machines are."""
    asked = ["plan", "--passages", "1000", "--topology"]
    (tmp_path / "t.yaml").write_text("gcp: {}\n")
    for name, said in (("t.yaml", "is there already: name a new file"), ("no/t.yaml", "in a folder that exists")):
        with pytest.raises(InvalidConfig, match=rf"{name}: .*{said}$"):
            CliRunner().invoke(app, [*asked, str(tmp_path / name)], catch_exceptions=False)
    assert (tmp_path / "t.yaml").read_text() == "gcp: {}\n"


def test_every_option_of_the_command_is_planned_for() -> None:
    wanted = {"passages": 1_000_000, "dimension": 768, "words": 50.0, "index": "Flat", "recall": 0.8}
    wanted |= {"exact_dtype": "float16", "questions_per_s": 2.0, "p99_s": 400.0, "growth": 0.5, "years": 2.0}
    wanted |= {"failures": 2, "generator_parameters": 1e6}
    names = {"p99_s": "--p99"}
    options = [
        part for name, value in wanted.items() for part in (names.get(name, f"--{name.replace('_', '-')}"), str(value))
    ]
    found = json.loads(CliRunner().invoke(app, ["plan", *options, "--json"], catch_exceptions=False).output)
    assert found["demand"] == wanted
    shape = found["index"]["shape"]
    assert (shape["n_passages"], shape["n_words"], shape["exact_bytes"]) == (2_250_000, 50.0, 2)
    assert found["index"]["replicas"] > 2


def test_the_screen_says_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "console", console := Console(width=200, file=StringIO(), record=True))
    screen.show(plan(DOUBLED, Machines(currency="CHF", machines=(KNOWN,)), DEFAULTS), DEFAULTS)
    shown = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert shown[:19] == [
        "for machines kind CHF a month",
        "index 2 m 1,460",
        "endpoint 3 m 2,190",
        "5 3,650",
        "index Flat, recall at 10 1.000 (exact, by proof)",
        "passages 1,000,000 of 384 numbers, after 1 year",
        "shards 1, every machine has all; 2 replicas of each",
        "memory 1.7 GB for one of each shard; 2.8 to read no disk",
        "disk 4.2 GB a snapshot: index 1.5, exact vectors 1.5, texts 0.7, words 0.4, origins 0.1",
        "search p50 52.1 ms, 631 questions a second",
        "answer p50 0.31 s, p99 0.9 s",
        "23.0 questions a second, 0 GPUs",
        "",
        "what breaks first, at so many times today's passages and questions",
        *(f"{each.times:.2f} {each.what}" for each in plan(DOUBLED, Machines(machines=(KNOWN,)), DEFAULTS).breaks),
    ]


def test_a_narrow_terminal_shows_all_that_a_plan_rests_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "console", console := Console(width=60, file=StringIO(), record=True))
    known = constants(None)
    screen.show(plan(Demand(passages=1_000_000, p99_s=400), OFFERED, known), known)
    assert "…" not in console.export_text()


def test_names_of_machines_and_of_where_it_was_measured_are_shown_as_they_are(tmp_path: Path) -> None:
    offered = [{**each.model_dump(), "name": f"{each.name}[/b]:m:"} for each in OFFERED.machines]
    (tmp_path / "m.yaml").write_text(json.dumps({"currency": "[red]", "machines": offered}))
    measured = Calibration(machine="[/i]", date="2026-11-23", values={"call_s": 0.5})
    (tmp_path / "c.yaml").write_text(measured.model_dump_json())
    asked = ["--machines", str(tmp_path / "m.yaml"), "--calibration", str(tmp_path / "c.yaml"), "--p99", "400"]
    shown = CliRunner().invoke(app, ["plan", "--passages", "1000000", *asked], catch_exceptions=False).output
    assert [said in shown for said in ("[/b]:m:", "[red] a month", "[/i]")] == [True] * 3


def test_where_a_calibration_goes_is_tried_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Calibration(machine="mine", date="2026-11-23", values={"call_s": 0.5})
    measured: list[str] = []
    monkeypatch.setattr(calibrate, "calibrate", lambda on_step: measured.append("once") or found)
    with pytest.raises(InvalidConfig, match=r"none/c\.yaml: must be a file in a folder that exists"):
        CliRunner().invoke(app, ["plan", "--calibrate", str(tmp_path / "none" / "c.yaml")], catch_exceptions=False)
    assert not measured
    assert CliRunner().invoke(app, ["plan", "--calibrate", str(tmp_path / "c.yaml")]).exit_code == 0
    assert constants(tmp_path / "c.yaml")["call_s"].value == 0.5


@pytest.mark.parametrize("other", [["--passages", "1000"], ["--topology", "t.yaml"], ["--rate", "1"], ["--json"]])
def test_a_calibration_takes_no_other_option(other: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be planned would be forgotten, and its file not be there."""
    monkeypatch.setattr(calibrate, "calibrate", lambda on_step: pytest.fail("measured"))
    option = other[0].replace("--rate", "--questions-per-s")
    with pytest.raises(InvalidRequest, match=f"^--calibrate only measures, and has no use for {option}"):
        CliRunner().invoke(app, ["plan", "--calibrate", str(tmp_path / "c.yaml"), *other], catch_exceptions=False)


@pytest.mark.parametrize("named", [True, False])
def test_a_calibration_reads_a_disk(named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/tmp is memory on many machines."""
    folders: list[Path] = []

    def stop(folder: Path, *of_a_tier: Any) -> Path:
        folders.append(folder)
        raise InterruptedError

    monkeypatch.setattr(calibrate, "build", stop)
    if named:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
    else:
        monkeypatch.delenv("TMPDIR", raising=False)
    with pytest.raises(InterruptedError):
        calibrate.calibrate(models=False)
    assert folders[0].is_relative_to(tmp_path if named else "/var/tmp")
    assert not folders[0].parent.exists()


def test_a_read_of_a_disk_is_its_part_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(bytes(10_000))
    monkeypatch.setattr(calibrate, "monotonic", iter((1.0, 4.2)).__next__)  # 320 of them
    assert calibrate._random_read_s(tmp_path / "f") == pytest.approx(0.01)


def test_a_real_tier_has_the_sizes_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBOOK_INDEX_SERVER__TLS", "{certificate: none, key: none}")  # of others: we ask without
    shape = Shape(6000, 64, "IVF32,SQ8", 2, WORDS, has_origins=False, has_words=False)
    snapshot = build(tmp_path / "s", shape.n_passages, shape.dimension, shape.index, shape.n_shards)
    own = dict(DEFAULTS) | {"bytes_per_word": replace(DEFAULTS["bytes_per_word"], value=6.0)}  # of generated texts
    own["title_bytes"] = replace(DEFAULTS["title_bytes"], value=22.0)
    found = served(snapshot, shape.dimension, 0.1)
    assert found.disk_bytes == pytest.approx(sizes(shape, own).snapshot, rel=0.05)
    assert found.memory_bytes == pytest.approx(memory(shape, own).wanted, rel=0.1)
    assert 0 < found.p50_s < 1
    assert 0 < found.server_cpu_s < 0.1
    assert 0 < found.client_cpu_s < 0.1
    assert found.rate > 0
    (snapshot / "shard-0001" / "vectors.npy").unlink()
    with pytest.raises(StartupError, match=r"index server of shard 1 did not start: openbook: .*vectors\.npy"):
        served(snapshot, shape.dimension, 0.1)


def test_who_stalls_has_asked_something_all_the_same(tmp_path: Path) -> None:
    assert served(build(tmp_path / "s", 100, 8, "Flat"), 8, 0.0).rate > 0


def test_a_server_that_is_lost_while_it_is_measured_is_named() -> None:
    with pytest.raises(ShardUnavailable, match=r"127\.0\.0\.1:1"):
        asyncio.run(_ask(("127.0.0.1:1",), generated(1, 16), [], 0.1))
