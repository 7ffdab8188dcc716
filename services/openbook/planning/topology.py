"""A plan as the topology file that `openbook deploy render` reads, but for where the machines are."""

from math import ceil, floor
from typing import Any

import yaml

from openbook.config import AnswerDefaults, section
from openbook.deployment.topology import Topology
from openbook.planning.plan import Plan

USABLE = 0.9
"""Of a machine's memory, for what we run there: page cache included."""
HEADER = """\
# What `openbook plan` found for {n} passages and {rate:g} questions a second: {price:,.0f} {currency} a month.
# Index: {index_machines} x {index} ({factory}). Endpoint: {endpoint_machines} x {endpoint}.
# Add where the machines are (aws, gcp, on_premise or kubernetes: docs/settings.md), then: openbook deploy render FILE
"""


def topology(found: Plan) -> Topology:
    """As values, checked."""
    index, endpoint = found.index, found.endpoint
    shards = index.shape.n_shards
    threads = max(1, index.machine.cores // index.shards_each)
    cores = endpoint.machine.cores
    small = min(1.0, cores / 8)  # of encoder and ingress, beside which a generator has all the rest: there is no second
    answer = {"timeout_s": found.demand.p99_s}
    if found.demand.p99_s > AnswerDefaults().max_timeout_s:
        answer["max_timeout_s"] = found.demand.p99_s
    gpus = endpoint.machine.gpus
    gpu = {
        "encoder": {"device": "cpu", "dtype": "float32"},  # or each would take what it finds, and be another encoder
        "generator": {
            "device": "cuda",
            "dtype": "bfloat16",
            "num_cpus": min(1.0, (cores - 2 * small) / max(1, gpus)),  # so that one for each GPU has room
            "num_gpus": 1,
        },
    }
    values: dict[str, Any] = {
        "index": {
            "shards": shards,
            "replicas": index.replicas,
            "threads": threads,
            "memory_gb": floor(1000 * index.machine.memory_gb * USABLE / index.shards_each) / 1000,
            "disk_gb": ceil(index.machine.disk_gb),
        },
        "endpoint": {
            "settings": {
                "serving": {"topology": "split", "n_replicas": endpoint.machines, "num_cpus": small},
                "encoder": {"n_replicas": endpoint.machines, "num_cpus": small},
                "generator": {
                    "n_replicas": max(endpoint.machines, endpoint.gpus),
                    "n_threads": cores,
                    "num_cpus": cores - 2 * small,
                },
                "answer": answer,
                "access": {"keys": "redis"},  # without keys nothing is deployed that others reach
            },
            "min_workers": endpoint.machines,
            "max_workers": 2 * endpoint.machines,
            "cpus": cores,
            "memory_gb": max(1, int(endpoint.machine.memory_gb * USABLE)),
        },
    }
    if gpus:
        values["endpoint"] |= {"gpu": gpu, "n_gpus": gpus}
    return section(Topology, "openbook plan", **values)


def text(found: Plan) -> str:
    """Of the file."""
    index, endpoint = found.index, found.endpoint
    header = HEADER.format(
        n=index.shape.n_passages,
        rate=found.demand.questions_per_s * found.demand.grown,
        price=found.price_a_month,
        currency=found.currency,
        index_machines=index.machines,
        index=index.machine.name,
        factory=index.shape.factory,
        endpoint_machines=endpoint.machines,
        endpoint=endpoint.machine.name,
    )
    values = topology(found).model_dump(mode="json", exclude_defaults=True)
    return header + str(yaml.safe_dump(values, sort_keys=False))
