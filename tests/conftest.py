"""Fixtures that more than one folder needs, and the limits under which every test runs."""

import os

# Before torch, FAISS or OpenBLAS are imported: more threads than cores make everything many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Ray's processes give way to all others, which are tests here that keep all cores busy: a run of two minutes took five.
os.environ.update(RAY_worker_niceness="0")
# Ray looks at it when it is imported, which tests may do before they start one.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
# Ray forks, and its node did not always start in a process with gRPC threads, such as other tests leave behind. That
# gRPC's fork handlers are the cause is a suspicion.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import gc
import signal
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from openbook.cache.server import RedisServer

# Processes of pytest-xdist are told a width, which Rich would keep though a test names another.
os.environ.pop("COLUMNS", None)
# A shell that runs the tests in the background has them ignore Ctrl-C, and the processes that they start and interrupt.
# Not Python's own handler itself: asyncio.run would put another in its place, and for that write out the task with its
# result, in an error that nobody sees, which takes milliseconds.
signal.signal(signal.SIGINT, lambda number, frame: signal.default_int_handler(number, frame))

# The same examples every time, however long they take: a run on a slow machine fails where a run on a fast one does.
# New examples are looked for with `pytest --hypothesis-profile=search`.
settings.register_profile(
    "search", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.register_profile("repeatable", settings.get_profile("search"), derandomize=True)
settings.load_profile("repeatable")

# Python's collector would look again and again through all that is imported: a sixth of the time until the first test.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


N_WITH_RAY = 2


class FewClusters(LoadFileScheduling):
    """Files of `e2e` go to two workers, as long as there are others: nodes of more Ray clusters at once die on slow
    machines. A third uses the processors while those two wait.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.nodes.index(node) >= N_WITH_RAY:
            others = (file for file in self.workqueue if "/e2e/" not in file)
            if (file := next(others, None)) is not None:
                self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return FewClusters(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(scope="module", autouse=True)
def short_pauses() -> None:
    """To look through all that was ever imported takes Python's collector 0.3 to 1 s, and who is asked meanwhile counts
    as silent.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """Models that are loaded again and again, by the same settings, are the same ones: to load one takes a second.

    Generators are those of evaluations, all of a module in one dtype: a checkpoint's model takes that of its generator.
    """
    from openbook.evaluation import system
    from openbook.models.encoder import TextEncoder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextEncoder, "load", staticmethod(cache(TextEncoder.load)))
        for name in ("load_generator", "RagGenerator"):  # an error, should `system` make its generators of others
            patch.setattr(system, name, cache(getattr(system, name)))
        yield


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of runs that nobody looks at: one takes as long as all else of a tiny run."""
    from openbook.evaluation import pictures
    from openbook.training import records

    for module in (pictures, records):
        monkeypatch.setattr(module, "draw", lambda of, picture: None)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tests keep all cores busy, what gives way to everybody would wait for their end."""
    from openbook.index.server import download, verify

    gives_way = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    for module, name in ((download, "_FETCH"), (verify, "_VERIFY")):
        code = getattr(module, name)
        assert gives_way in code
        monkeypatch.setattr(module, name, code.replace(gives_way, "pass"))


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real Redis for all who do not stop or freeze it."""
    with RedisServer() as server:
        yield server
