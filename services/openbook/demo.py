"""`openbook demo`: the whole system on the embedded corpus, some questions, and a clean stop."""

import sys
import time
from pathlib import Path

from openbook import config
from openbook.client import Client
from openbook.core.types import Formulation
from openbook.corpus.build import build_corpus, embedded_documents
from openbook.processes import free_port
from openbook.serving.launch.local import local_system, until_stopped
from openbook.terminal import build_progress, console, print_answer

FOLDER = Path("var/demo")
"""Where the snapshot of the embedded corpus is kept, if nothing else is said."""
N_SHARDS = 2
QUESTIONS = (
    ("who invented the telephone?", Formulation.SEQUENCE),
    ("Where was Marie Curie born?", Formulation.SEQUENCE),
    ("Which NFL team represented the AFC at Super Bowl 50?", Formulation.SEQUENCE),
    ("Which NFL team represented the AFC at Super Bowl 50?", Formulation.TOKEN),
)


def embedded_snapshot(folder: Path) -> Path:
    """The snapshot of the embedded corpus in the folder, built with a bar of progress unless it stands.

    Raises:
        OpenbookError: as `build_corpus`.
    """
    snapshot = folder / "snapshot"
    if not snapshot.exists():
        console.print(f"building {snapshot}: {N_SHARDS} shards of the embedded corpus")
        encoder = config.EncoderSettings(dtype="auto")
        with build_progress() as on_progress:
            build_corpus(
                embedded_documents(), snapshot, encoder, n_shards=N_SHARDS, factory="Flat", on_progress=on_progress
            )
    return snapshot


def run(folder: Path, begun: float) -> None:
    """Build the snapshot unless it stands, start everything on free ports, ask, stop. Raises what these raise.

    `begun`: when the command did, as `time.monotonic` says it.
    """
    snapshot = embedded_snapshot(folder)
    settings = config.load()
    free = {"http_port": free_port(), "grpc_port": free_port()}
    free["n_replicas"] = settings.serving.n_replicas or 1  # more would answer more at once, and not be there sooner
    settings = settings.model_copy(update={"serving": settings.serving.model_copy(update=free)})
    with (
        until_stopped(),
        local_system(snapshot, settings, shows_logs=False),
        Client(f"127.0.0.1:{free['grpc_port']}", 120) as client,
    ):
        console.print(f"ready to answer {time.monotonic() - begun:.1f} s after the start")
        for question, formulation in QUESTIONS:
            print_answer(question, client.answer(question, formulation=formulation))
    print(f"\nTo keep it running, and see every word with its passages:\n\n    {sys.argv[0]} up {snapshot} --open\n")
