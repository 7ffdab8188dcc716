"""`ray up` on three machines that stand, each a namespace with an sshd of its own; `make walk-cluster` adds faults."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

WALK = Path(__file__).parents[1] / "walk_cluster.py"
NEEDED = ("sshd", "ssh-keygen", "rsync", "openssl", "ip", "unshare", "setpriv", "ps")
APART = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
OVERLAY = f"""mount -t tmpfs tmpfs /mnt && mkdir /mnt/up /mnt/work /mnt/root &&
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work /mnt/root &&
test -x /mnt/root{sys.executable} -a -e /mnt/root{WALK} -a -d /mnt/root{tempfile.gettempdir()}"""


def missing() -> str:
    """Why no machines can be made here."""
    if absent := [name for name in NEEDED if not shutil.which(name)]:
        return f"no {', '.join(absent)}"
    tried = subprocess.run([*APART, "sh", "-c", OVERLAY], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else tried.stderr or "of its files not all are on one file system"


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
        assert walked.stdout.count("no process left") == 3
    finally:
        shutil.rmtree(folder)
