"""Shards on a GPU: the CPU's index, moved there when a server starts. Scores still come from the stored vectors.

Experimental: written against FAISS 1.15's interface on machines without a GPU; what stands here was not run on one.
"""

from importlib import import_module
from typing import Any

from openbook.core.types import Float32
from openbook.errors import StartupError

MAX_CANDIDATES = 2048
"""FAISS's limit for one GPU search."""


def move(cpu_index: Any, vectors: Float32, device: str) -> Any:
    """A FAISS index on `cuda:N` that searches what this one does: Flat in float16, IVF as it is, HNSW as CAGRA.

    Raises:
        StartupError: this FAISS has no GPUs or not that one, or the index type has no counterpart there.
    """
    faiss: Any = import_module("faiss")  # what only GPU builds have is in no stubs
    number = _number(faiss, device)
    resources = faiss.StandardGpuResources()
    try:
        if isinstance(cpu_index, faiss.IndexFlat):
            config = faiss.GpuIndexFlatConfig()
            config.device, config.useFloat16 = number, True
            index = faiss.GpuIndexFlatIP(resources, cpu_index.d, config)
            index.copyFrom(cpu_index)
        elif isinstance(cpu_index, faiss.IndexHNSW):
            if not hasattr(faiss, "GpuIndexCagra"):
                raise StartupError(f"device {device}: HNSW becomes CAGRA there, which needs the build faiss-gpu-cuvs")
            config = faiss.GpuIndexCagraConfig()
            config.device = number
            index = faiss.GpuIndexCagra(resources, cpu_index.d, faiss.METRIC_INNER_PRODUCT, config)
            index.train(vectors)
        else:
            options = faiss.GpuClonerOptions()
            options.useFloat16 = True
            index = faiss.index_cpu_to_gpu(resources, number, cpu_index, options)
    except RuntimeError as error:
        raise StartupError(f"device {device}: {type(cpu_index).__name__} cannot be moved there: {error}") from None
    index.resources = resources  # they must live as long
    return index


def _number(faiss: Any, device: str) -> int:
    if not hasattr(faiss, "StandardGpuResources"):
        raise StartupError(f"device {device}: this FAISS was built for CPUs: it takes 'openbook[gpu]' instead of [cpu]")
    number, n_gpus = int(device.removeprefix("cuda:")), faiss.get_num_gpus()
    if number >= n_gpus:
        raise StartupError(f"device {device}: must be below cuda:{n_gpus}, FAISS sees {n_gpus} GPUs")
    return number
