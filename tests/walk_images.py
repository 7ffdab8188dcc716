"""The Dockerfiles walked without Docker: every line of theirs carried out in order, in a root of its own.

    python tests/walk_images.py deploy/Dockerfile.index

Each stage's root is this machine's disk with a layer over it that is thrown away, in place of the image that it is
FROM; `python` is this machine's. COPY copies, RUN runs, and of the last stage the program of ENTRYPOINT is
asked for its help by USER, with a root that it cannot write to. Needs root on Linux. Downloads what pip downloads.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
WALK = Path("/dev/shm/openbook-images")  # not on the disk that it is a layer over
MOUNT = """
set -eu
mount --make-rprivate /
mkdir -p "$1/up" "$1/work" "$1/root"
mount -t overlay overlay -o lowerdir=/,upperdir="$1/up",workdir="$1/work" "$1/root"
mount --rbind /dev "$1/root/dev"
mount -t proc proc "$1/root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$1/root/tmp"
test "$3" = 0 || mount -o remount,ro "$1/root"
exec chroot --userspec="$3:$3" "$1/root" sh -c "$2"
"""


class Stage:
    """One stage of a Dockerfile."""

    def __init__(self, name: str) -> None:
        self.folder = WALK / name
        (self.folder / "up").mkdir(parents=True)
        self.directory = "/"
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/tmp"}
        python = self.folder / "up/usr/local/bin/python"
        python.parent.mkdir(parents=True)
        python.symlink_to("/usr/bin/python3")  # whose files everybody may read

    def run(self, command: str, user: str = "0") -> None:
        """As a line of RUN."""
        begun = time.monotonic()
        print(f"RUN {' '.join(command.split())[:150]}", flush=True)
        whole = f"mkdir -p {self.directory} 2>/dev/null; cd {self.directory} && {command}"
        isolated = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", MOUNT, "sh", str(self.folder), whole, user]
        env = {**{name: value for name, value in os.environ.items() if "proxy" in name.lower()}, **self.environment}
        done = subprocess.run(
            isolated, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode:
            raise SystemExit(f"ended with {done.returncode}:\n{done.stdout[-3000:]}")
        print(f"  {time.monotonic() - begun:.0f} s", flush=True)

    def copy(self, source: Path, to: str) -> None:
        """As COPY of one source."""
        where = self.folder / "up" / os.path.join(self.directory, to).lstrip("/")
        if to.endswith("/"):
            where /= source.name
        where.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, where, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, where)


def walk(dockerfile: Path) -> None:
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.M)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    stages: dict[str, Stage] = {}
    stage, user, entry = Stage("none"), "0", ["true"]
    for line in filter(str.strip, lines):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            name = rest.split()[-1] if " AS " in rest else "last"
            stage = stages[name] = Stage(name)
        elif word == "ARG":
            stage.environment[rest.partition("=")[0]] = os.environ.get(rest.partition("=")[0], rest.partition("=")[2])
        elif word == "ENV":
            for each in shlex.split(rest):
                key, _, value = each.partition("=")
                stage.environment[key] = value.replace("$PATH", stage.environment["PATH"])
        elif word == "WORKDIR":
            stage.directory = rest
        elif word == "COPY" and rest.startswith("--from="):
            other, source, to = rest.removeprefix("--from=").split()
            stage.copy(stages[other].folder / "up" / source.lstrip("/"), to)
        elif word == "COPY":
            *sources, to = rest.split()
            for each in sources:
                stage.copy(ROOT / each, to if to != "./" else "./")
        elif word == "RUN":
            stage.run(rest)
        elif word == "USER":
            user = rest.partition(":")[0]
        elif word == "ENTRYPOINT":
            entry = json.loads(rest)
    stage.run(f"{shlex.join(entry)} --help >/dev/null && {shlex.join(entry)} index serve --help >/dev/null", user)
    stage.run(
        "! touch /written 2>/dev/null && ! python -c 'import os; os.mkdir(\"/opt/openbook/written\")' 2>/dev/null", user
    )
    size = subprocess.run(["du", "-sm", str(stage.folder / "up/opt")], capture_output=True, text=True, check=True)
    print(f"{dockerfile.name}: {size.stdout.split()[0]} MB in /opt", flush=True)


if __name__ == "__main__":
    try:
        walk(Path(sys.argv[1]))
    finally:
        shutil.rmtree(WALK, ignore_errors=True)
