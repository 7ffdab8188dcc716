"""Shards on a GPU: the CPU's index, moved there when a server starts. Scores still come from the stored vectors."""

import ctypes
from importlib import import_module
from typing import Any

from openbook.core.types import Float32
from openbook.errors import StartupError

MAX_CANDIDATES = 2048
"""FAISS's limit for one GPU search, of what is found and of the cells that are searched."""

WORKSPACE = 2 << 30
"""Bytes that must be free there before an index is moved: FAISS takes 1.5 GiB for the searches of each, and cuBLAS
some. If these have no room the process ends; an index that has none is an error."""


def move(cpu_index: Any, vectors: Float32, device: str) -> Any:
    """A FAISS index on `cuda:N` that searches what this one does: Flat in float16, IVF as it is, HNSW as CAGRA.

    The cells of an IVF index are chosen there by comparing all centroids, whatever chooses them on the CPU.

    Raises:
        StartupError: this FAISS has no GPUs or not that one, the GPU is full, or the index type has no counterpart
            there.
    """
    faiss: Any = import_module("faiss")  # what only GPU builds have is in no stubs
    number = _number(faiss, device)
    free = _free_bytes(number)
    if free is not None and free < WORKSPACE:
        least, found = WORKSPACE / 2**30, free / 2**30
        raise StartupError(f"device {device}: must have {least:.0f} GiB free, and room for the index; has {found:.1f}")
    resources = faiss.StandardGpuResources()  # the index keeps it
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
            compare_all_centroids(cpu_index)
            index = faiss.index_cpu_to_gpu(resources, number, cpu_index, options)
            inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
            if not isinstance(inner, faiss.GpuIndex):  # FAISS 1.15 raises; a copy on the CPU would go unnoticed
                raise StartupError(f"device {device}: {type(inner).__name__} has no counterpart there")
    except RuntimeError as error:
        raise StartupError(f"device {device}: {type(cpu_index).__name__} cannot be moved there: {error}") from None
    return index


def compare_all_centroids(cpu_index: Any) -> None:
    """Choose an IVF index' cells by its centroids themselves, no longer by a graph or codes of them.

    A GPU has neither, and would wait for the CPU to choose.
    """
    faiss: Any = import_module("faiss")
    ivf = faiss.try_extract_index_ivf(cpu_index)
    if ivf is None or isinstance(faiss.downcast_index(ivf.quantizer), faiss.IndexFlat):
        return
    flat = faiss.IndexFlat(ivf.d, ivf.quantizer.metric_type)
    flat.add(ivf.quantizer.reconstruct_n(0, ivf.nlist))
    former = ivf.quantizer
    if ivf.own_fields:  # now Python frees the one, and the index the other
        former.this.own(True)
    flat.this.own(False)
    ivf.quantizer, ivf.own_fields = flat, True


def _free_bytes(number: int) -> int | None:
    """Of a GPU; None where CUDA's runtime is not to be seen, as in builds that are not wheels."""
    runtime = ctypes.CDLL(None)  # wheels of FAISS load it for all to see
    if not hasattr(runtime, "cudaMemGetInfo"):
        return None
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    failed = runtime.cudaSetDevice(number) or runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return None if failed else free.value


def _number(faiss: Any, device: str) -> int:
    if not hasattr(faiss, "StandardGpuResources"):
        raise StartupError(f"device {device}: this FAISS was built for CPUs: it takes 'openbook[gpu]' instead of [cpu]")
    number, n_gpus = int(device.removeprefix("cuda:")), faiss.get_num_gpus()
    if number >= n_gpus:
        raise StartupError(f"device {device}: must be below cuda:{n_gpus}, FAISS sees {n_gpus} GPUs")
    return number
