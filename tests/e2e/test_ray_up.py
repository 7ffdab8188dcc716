"""`ray up` on three machines that stand, each a namespace with an sshd of its own; `make walk-cluster` adds faults."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from machines import WALK, missing


@pytest.mark.timeout(900)
def test_up_up_again_and_down() -> None:
    if why := missing():
        pytest.skip(f"no machines in namespaces here: {why}")
    folder = tempfile.mkdtemp(prefix="walk-", dir="/var/tmp")  # of a short name: sockets lie in it
    try:
        walked = subprocess.run(
            [sys.executable, WALK, "--without-faults"],
            env={**os.environ, "OPENBOOK_WALK": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert walked.returncode == 0, walked.stdout
        assert "Who invented the telephone? Alexander Graham Bell" in walked.stdout
        assert walked.stdout.count("of which are gone: none") == 3
        assert "over HTTP: 401 without a key; with it 200, Alexander Graham Bell" in walked.stdout
        assert "another one is in its place" in walked.stdout
        assert walked.stdout.count("no process left") == 3
        assert walked.stdout.count("files left: /root/openbook\n") == 3
    finally:
        shutil.rmtree(folder)
