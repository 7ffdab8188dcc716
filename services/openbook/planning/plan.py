"""From what is wanted to machines: every choice is the cheapest of those that suffice. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil

from openbook.errors import InvalidRequest
from openbook.planning.constants import Constants
from openbook.planning.demand import Demand, Machine, Machines
from openbook.planning.model import Memory, Shape, Sizes, Times, asking_s, memory, sizes, times

GB = 1e9
HOURS_A_MONTH = 730
MAX_SHARDS = 1024
RECALL = {"Flat": (1.0, "exact, by proof"), "HNSW": (0.99, "docs/tune-index.md: nearly all; certify yours")}
CODES_RECALL = (0.97, "docs/measurements/scale.md: IVF4096,SQ8, generated vectors; certify yours")
CODED = {"SQ8": CODES_RECALL, "RaBitQfs": (0.967, "scale.md: its 0.997 after SQ8's cells; certify yours")}
INDICES = ("Flat", "HNSW32", "IVF,SQ8", "IVF,RaBitQfs")


@dataclass(frozen=True, slots=True)
class IndexTier:
    """Machines that serve the index."""

    shape: Shape
    machine: Machine
    shards_each: int  # of a machine
    replicas: int  # of each shard
    machines: int
    memory: Memory  # of all shards once
    sizes: Sizes
    times: Times
    cached: float  # share of the exact vectors in memory
    rate: float  # questions a second, of all machines but those that may be lost
    price: float  # an hour

    @property
    def everywhere(self) -> bool:
        """Whether each machine serves every shard, as `ray up` and systemd have it; else Kubernetes spreads them."""
        return self.shards_each == self.shape.n_shards


@dataclass(frozen=True, slots=True)
class EndpointTier:
    """Machines that encode and generate."""

    machine: Machine
    machines: int
    answer_s: float  # p50 of the models and the endpoint, alone
    rate: float  # as of the index
    price: float

    @property
    def gpus(self) -> int:
        """In all."""
        return self.machines * self.machine.gpus


@dataclass(frozen=True, slots=True)
class Breaks:
    """What gives way first as passages and questions grow together, and at how many times today's."""

    what: str
    times: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What to take, and what it does."""

    demand: Demand
    index: IndexTier
    endpoint: EndpointTier
    recall: float
    recall_source: str
    p99_s: float
    breaks: tuple[Breaks, ...]  # the first first
    warnings: tuple[str, ...]
    price_a_month: float
    currency: str


def plan(demand: Demand, offered: Machines, c: Constants) -> Plan:
    """The cheapest machines that do it.

    Raises:
        InvalidRequest: no index has that recall, or no machine is large enough; says what would be.
    """
    chosen, endpoint = _chosen(demand, offered.machines, c)
    p99 = _p99_s(chosen, endpoint, c)
    recall, source = recall_of(chosen.shape.index)
    return Plan(
        demand,
        chosen,
        endpoint,
        recall,
        source,
        p99,
        _breaks(demand, chosen, endpoint, c),
        tuple(_warnings(demand, chosen, endpoint, p99, c)),
        (chosen.price + endpoint.price) * HOURS_A_MONTH,
        offered.currency,
    )


def recall_of(index: str) -> tuple[float, str]:
    """At 10, as it was measured, and where."""
    for name, found in (*RECALL.items(), *CODED.items()):
        if name in index:
            return found
    raise InvalidRequest(f"index must be one of {', '.join(INDICES)}, got {index}")


def everything_held(index: IndexTier) -> float:
    """Bytes with which one server of each shard never reads the disk, whatever is asked; words for each machine."""
    return index.memory.wanted + index.sizes.texts + index.sizes.words * (index.machines // index.replicas)


def _chosen(demand: Demand, machines: Sequence[Machine], c: Constants) -> tuple[IndexTier, EndpointTier]:
    """The cheapest two that are in time together; where none are, the fastest endpoint, and the cheapest index whose
    search takes half of the time, or else the fastest.
    """
    endpoints = [*_endpoint_tiers(demand, machines, c)]
    half_s, tail = demand.p99_s / 2, c["endpoint_tail"].value
    left_s = {demand.p99_s - tier.answer_s * tail for tier in endpoints}  # for the search, beside each endpoint
    limits_s = [half_s, *sorted((each for each in left_s if each > 0), reverse=True)]
    indices = [tier for limit_s in limits_s for tier in _index_tiers(demand, machines, limit_s, c)]
    if not (indices := indices or _fastest(demand, machines, c)):
        raise InvalidRequest(
            f"no index machine suffices for {demand.passages} passages of {demand.dimension} numbers, recall "
            f"{demand.recall}, {demand.questions_per_s} questions a second: offer larger ones, or ask for less recall"
        )
    both = [each for each in product(indices, endpoints) if _p99_s(*each, c) <= demand.p99_s]
    if not both:
        fastest_s = min(tier.answer_s for tier in endpoints)
        both = [each for each in product(indices, endpoints) if each[1].answer_s == fastest_s]
    return min(both, key=lambda each: (each[0].price + each[1].price, each[0].machines + each[1].machines))


def _p99_s(index: IndexTier, endpoint: EndpointTier, c: Constants) -> float:
    return index.times.alone * c["index_tail"].value + endpoint.answer_s * c["endpoint_tail"].value


def _index_tiers(demand: Demand, machines: Sequence[Machine], limit_s: float, c: Constants) -> Iterator[IndexTier]:
    """The cheapest of each kind whose search is in time: more shards are faster, on as many machines as have cores."""
    for index, machine in _kinds(demand, machines):
        tiers = _of_any_shards(demand, index, machine, limit_s, c)
        yield from sorted(tiers, key=lambda tier: (tier.machines, tier.shape.n_shards))[:1]


def _fastest(demand: Demand, machines: Sequence[Machine], c: Constants) -> list[IndexTier]:
    """The one whose search takes least, in however many shards; none where no machine is large enough."""
    found: list[IndexTier] = []
    for (index, machine), shards in product(_kinds(demand, machines), range(1, MAX_SHARDS + 1)):
        if found and asking_s(shards, c) > found[0].times.alone:
            continue
        if tier := index_tier(demand, _shape(demand, index, shards), machine, c):
            found = [min([tier, *found], key=lambda each: (each.times.alone, each.price, each.machines))]
    return found


def _kinds(demand: Demand, machines: Sequence[Machine]) -> Iterator[tuple[str, Machine]]:
    """Every index that finds enough, on every machine."""
    indices = (demand.index,) if demand.index else INDICES
    return product([index for index in indices if recall_of(index)[0] >= demand.recall], machines)


def _shape(demand: Demand, index: str, shards: int) -> Shape:
    """At the end."""
    exact_bytes = 2 if demand.exact_dtype == "float16" else 4
    return Shape(ceil(demand.passages * demand.grown), demand.dimension, index, shards, demand.words, exact_bytes)


def _of_any_shards(demand: Demand, index: str, machine: Machine, limit_s: float, c: Constants) -> Iterator[IndexTier]:
    """Those that suffice, with every number of shards that may be the best. Shards beyond one for each machine cost
    more, unless a search has to be divided further to be in time: then a multiple of the machines is the best.
    """
    shards, last, is_first = 1, MAX_SHARDS, True
    limit_s /= c["index_tail"].value
    while shards <= last and asking_s(shards, c) <= limit_s:
        tier = index_tier(demand, _shape(demand, index, shards), machine, c)
        if tier and tier.times.alone <= limit_s:
            if is_first:  # on more machines than it takes, none is cheaper
                last, is_first = min(last, max(2 * shards, tier.machines // (1 + demand.failures))), False
            yield tier
        shards += 1


def index_tier(demand: Demand, shape: Shape, machine: Machine, c: Constants) -> IndexTier | None:
    """As many of a kind of machine as serve this; None if a shard does not fit on one."""
    usable, busy = c["usable"].value, c["busy"].value
    wanted, found = memory(shape, c), sizes(shape, c)
    room = machine.memory_gb * GB * usable
    disk = machine.disk_gb * GB * usable / c["snapshots_on_disk"].value - found.words  # for shards, of one snapshot
    by_memory, by_disk = (int(shape.n_shards * x) for x in (room / wanted.needed, disk / found.divided))
    each = min(shape.n_shards, by_memory, by_disk, machine.cores)  # those that shared a core would take turns
    if each < 1:
        return None
    groups = ceil(shape.n_shards / each)
    each = ceil(shape.n_shards / groups)  # as evenly as can be
    share = each / shape.n_shards
    spare = room - wanted.needed * share
    optional = (wanted.wanted - wanted.needed) * share
    cached = min(1.0, spare / optional) if optional else 1.0
    taken = times(shape, c, cached)
    rate_of_one = machine.cores * busy / (taken.server_cpu * share)
    wanted_rate = demand.questions_per_s * demand.grown
    replicas = ceil(wanted_rate / rate_of_one) + demand.failures
    n = groups * replicas
    rate = rate_of_one * (replicas - demand.failures)
    return IndexTier(shape, machine, each, replicas, n, wanted, found, taken, cached, rate, n * machine.price)


def _endpoint_tiers(demand: Demand, machines: Sequence[Machine], c: Constants) -> Iterator[EndpointTier]:
    """On GPUs and without; a generator is as much slower as it is larger."""
    generate_s = c["generate_s"].value * demand.generator_parameters / c["embedded_parameters"].value
    other_s = c["encode_s"].value + c["endpoint_s"].value
    wanted = demand.questions_per_s * demand.grown
    for machine in machines:
        if machine.gpus:
            alone = generate_s / machine.gpu_times_core
            rate_of_one = min(machine.gpus / alone, machine.cores / other_s)
        else:
            alone = generate_s / min(machine.cores, 2)  # an answer by itself gains little from more
            rate_of_one = machine.cores / (generate_s + other_s)
        rate_of_one *= c["busy"].value
        n = ceil(wanted / rate_of_one)
        yield EndpointTier(
            machine,
            n + demand.failures,
            alone + other_s,
            n * rate_of_one,
            (n + demand.failures) * machine.price,
        )


def _breaks(demand: Demand, index: IndexTier, endpoint: EndpointTier, c: Constants) -> tuple[Breaks, ...]:
    """By bisection: sizes and times do not always grow in proportion."""
    shape, machine, usable = index.shape, index.machine, c["usable"].value
    share = index.shards_each / shape.n_shards
    held = index.replicas - demand.failures

    def tier(times_today: float) -> Shape:
        return shape.of(max(1, ceil(demand.passages * times_today)))

    def memory_fits(x: float) -> bool:
        return memory(tier(x), c).needed * share <= machine.memory_gb * GB * usable

    def all_in_memory(x: float) -> bool:
        found = sizes(tier(x), c)
        return (memory(tier(x), c).wanted + found.texts) * share + found.words <= machine.memory_gb * GB * usable

    def disk_fits(x: float) -> bool:
        found = sizes(tier(x), c)
        return (found.divided * share + found.words) * c["snapshots_on_disk"].value <= machine.disk_gb * GB * usable

    def searches_keep_up(x: float) -> bool:
        cpu = times(tier(x), c).server_cpu * share
        return demand.questions_per_s * x <= held * machine.cores * c["busy"].value / cpu

    found = [
        Breaks("memory of the index machines: the index itself", _last(memory_fits)),
        Breaks(
            "memory of the index machines for all, texts and words too: some questions read the disk",
            _last(all_in_memory),
        ),
        Breaks("disk of the index machines", _last(disk_fits)),
        Breaks("cores of the index machines", _last(searches_keep_up)),
        Breaks("the generator's machines", endpoint.rate / demand.questions_per_s),
    ]
    return tuple(sorted(found, key=lambda each: each.times))


def _last(holds: Callable[[float], bool]) -> float:
    """The largest multiple of today for which it holds, to a hundredth; 0 if for none, a million if for all."""
    low, high = 0.0, 1e6
    if holds(high):
        return high
    while high - low > max(1e-3, low / 200):
        middle = (low + high) / 2 if low else high / 10
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _warnings(demand: Demand, index: IndexTier, endpoint: EndpointTier, p99: float, c: Constants) -> Iterator[str]:
    if p99 > demand.p99_s:
        searches_s = p99 - (answers_s := endpoint.answer_s * c["endpoint_tail"].value)
        yield (
            f"p99 will be {p99:.3f} s, not {demand.p99_s:g} s, {searches_s:.3f} to search and {answers_s:.3f} to "
            "generate: none of these machines is fast enough"
        )
    if index.cached < 1:
        yield f"{1 - index.cached:.0%} of the exact vectors are read from disk when they are scored: take local SSDs"
    if not index.everywhere:
        yield "no machine holds every shard: only Kubernetes spreads shards over machines (docs/deploy.md)"
    if endpoint.machine.gpus:
        yield f"gpu_times_core = {endpoint.machine.gpu_times_core:g} is assumed, unless you measured it (`make gpu`)"
    if demand.failures == 0:
        yield "the loss of any machine stops answers"
