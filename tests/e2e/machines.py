"""Machines that are namespaces of this one: see `walk_cluster.py`."""

import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

WALK = Path(__file__).parents[1] / "walk_cluster.py"
NEEDED = ("sshd", "ssh-keygen", "rsync", "openssl", "ip", "unshare", "setpriv", "ps")
APART = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
OVERLAY = f"""mount -t tmpfs tmpfs /mnt && mkdir /mnt/up /mnt/work /mnt/root &&
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/up,workdir=/mnt/work /mnt/root &&
test -x /mnt/root{sys.executable} -a -e /mnt/root{WALK} -a -d /mnt/root{tempfile.gettempdir()}"""


@cache
def missing() -> str:
    """Why no machines can be made here."""
    if absent := [name for name in NEEDED if not shutil.which(name)]:
        return f"no {', '.join(absent)}"
    tried = subprocess.run([*APART, "sh", "-c", OVERLAY], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else tried.stderr or "of its files not all are on one file system"
