"""A plan for people."""

from rich.table import Table

from openbook.planning.constants import Constants
from openbook.planning.plan import GB, Plan, everything_held
from openbook.terminal import console, counted

ENDLESS = 1000


def show(found: Plan, constants: Constants) -> None:
    """Machines, what they do, what breaks first, what it rests on."""
    index, endpoint, demand = found.index, found.endpoint, found.demand
    machines = Table(box=None, padding=(0, 2), header_style="dim")
    for title, justify in (
        ("for", "left"),
        ("machines", "right"),
        ("kind", "left"),
        (f"{found.currency} a month", "right"),
    ):
        machines.add_column(title, justify="right" if justify == "right" else "left")
    share = found.price_a_month / (index.price + endpoint.price) if index.price + endpoint.price else 0
    machines.add_row("index", str(index.machines), index.machine.name, f"{index.price * share:,.0f}")
    machines.add_row("endpoint", str(endpoint.machines), endpoint.machine.name, f"{endpoint.price * share:,.0f}")
    machines.add_row("", str(index.machines + endpoint.machines), "", f"{found.price_a_month:,.0f}", style="bold")
    console.print(machines)
    facts = Table(box=None, padding=(0, 2), show_header=False)
    size = index.sizes
    where = "every machine has all" if index.everywhere else f"{index.shards_each} on a machine"
    files = ", ".join(
        f"{name} {_gb(n_bytes)}"
        for name, n_bytes in (
            ("index", size.index),
            ("exact vectors", size.exact),
            ("texts", size.texts),
            ("words", size.words),
            ("origins", size.origins),
        )
    )
    for name, value in (
        ("index", f"{index.shape.factory}, recall at 10 {found.recall:.3f} ({found.recall_source})"),
        (
            "passages",
            f"{index.shape.n_passages:,} of {index.shape.dimension} numbers, after {counted(demand.years, 'year')}",
        ),
        ("shards", f"{index.shape.n_shards}, {where}; {counted(index.replicas, 'replica')} of each"),
        (
            "memory",
            f"{_gb(index.memory.needed)} GB for one of each shard; {_gb(everything_held(index))} to read no disk",
        ),
        ("disk", f"{_gb(size.snapshot)} GB a snapshot: {files}"),
        ("search", f"p50 {1e3 * index.times.alone:.1f} ms, {index.rate:,.0f} questions a second"),
        ("answer", f"p50 {endpoint.answer_s + index.times.alone:.2f} s, p99 {found.p99_s:.1f} s"),
        ("", f"{endpoint.rate:,.1f} questions a second, {counted(endpoint.gpus, 'GPU')}"),
    ):
        facts.add_row(name, value)
    console.print(facts)
    console.print("\nwhat breaks first, at so many times today's passages and questions")
    for each in found.breaks:
        times = f"{each.times:.2f}" if each.times < ENDLESS else "> 1000"
        console.print(f"  {times:>8}  {each.what}", highlight=False)
    for warning in found.warnings:
        console.print(f"mind: {warning}", style="yellow", highlight=False)
    table = Table(title="\nwhat this rests on", title_justify="left", box=None, padding=(0, 1), header_style="dim")
    for title in ("value", "of", "from"):
        table.add_column(title, justify="right" if title == "value" else "left", overflow="fold")
    for constant in constants.values():
        table.add_row(f"{constant.value:.3g}", constant.means, constant.source)
    console.print(table)


def _gb(n_bytes: float) -> str:
    return f"{n_bytes / GB:,.1f}"
