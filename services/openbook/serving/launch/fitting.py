"""What settings leave open, fitted to the machine that serves."""

from pathlib import Path

from openbook.config import Settings
from openbook.processes import memory_bytes, threads

MAX_REPLICAS = 4
REPLICA_BYTES = 4 << 30
"""Of the machine's memory, for each replica of the ingress. Of all there is, not of what is free: a changed
configuration must come to the same number while it runs."""


def fitted(settings: Settings) -> Settings:
    """With what was left open fitted to this machine: how many replicas of the ingress, and threads of each generator.

    Where there are GPUs, one replica for each: `serving.app.on_its_gpu` has each take another. Else two models of one
    thread answer half as many questions again as one of two, and none waits for a batch behind the other
    (docs/measurements/serving.md); two that compute with all cores at once would stand in each other's way.
    """
    generator, serving = settings.generator, settings.serving
    is_fused = serving.topology == "fused"
    n_replicas = serving.n_replicas or (_replicas(settings) if is_fused else 1)
    n_generators = n_replicas if is_fused else generator.n_replicas
    n_threads = generator.n_threads
    if n_generators > 1 and not n_threads:
        n_threads = max(1, threads() // n_generators)
    return settings.model_copy(
        update={
            "serving": serving.model_copy(update={"n_replicas": n_replicas}),
            "generator": generator.model_copy(update={"n_threads": n_threads}),
        }
    )


def n_gpus() -> int:
    """Which torch sees. It is not asked, as that takes a second, where no driver of any is there."""
    if not any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "kfd")):
        return 0
    from torch import cuda

    return int(cuda.device_count())


def _replicas(settings: Settings) -> int:
    models = settings.encoder, settings.generator
    is_open = settings.generator.device in ("auto", "cuda") and not any(model.num_gpus for model in models)
    if is_open and (n := n_gpus()):
        return n
    if any(model.num_gpus or model.device not in ("auto", "cpu") for model in models):
        return 1
    n_cores = threads() // (settings.generator.n_threads or 1)
    return max(1, min(n_cores, memory_bytes() // REPLICA_BYTES, MAX_REPLICAS))
