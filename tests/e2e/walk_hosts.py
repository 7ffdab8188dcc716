"""docs/deploy.md, *Two machines without a cluster*, carried out: index servers on one, the endpoint on the other.

A machine is a namespace of network, mounts and processes, with /etc, /opt and /srv of its own; a cable joins the two.
In place of systemd stands a program that starts what the units say, with their credentials and environment.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from documented import ROOT, blocks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

DOCUMENT = (
    '{"id": "bell", "title": "Telephone", "text": "The telephone was invented by Alexander Graham Bell in 1876."}'
)
HEADING = "Two machines without a cluster"
INDEX, ENDPOINT = "10.0.0.2", "10.0.0.1"  # as the page calls them
MACHINE = """
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
mkdir "$1/etc" "$1/work"
mount -t overlay overlay -o lowerdir=/etc,upperdir="$1/etc",workdir="$1/work" /etc
for each in /opt /srv /run; do mount -t tmpfs tmpfs $each; done
mkdir -p /opt/openbook/bin /srv/openbook /etc/openbook/tls /etc/systemd/system
ln -s "$2" /opt/openbook/bin/openbook
ip link set lo up
echo ready
exec sleep infinity
"""
OPENBOOK = """#!/bin/sh
exec {python} -m openbook.cli "$@"
"""
SYSTEMCTL = '''#!{python}
"""`systemctl enable --now UNIT...`, as far as our units need it."""
import os, re, shlex, shutil, subprocess, sys
from pathlib import Path

assert sys.argv[1:3] == ["enable", "--now"]
for unit in sys.argv[3:]:
    name, at, instance = unit.partition("@")
    credentials, state = Path("/run/credentials", unit), Path("/run/state")
    credentials.mkdir(parents=True)
    (state / "openbook").mkdir(parents=True, exist_ok=True)
    text = Path(f"/etc/systemd/system/{{name}}{{at}}.service").read_text()
    for specifier, value in {{"%i": instance, "%t": "/run", "%n": unit, "%S": str(state), "$$": "$"}}.items():
        text = text.replace(specifier, value)
    said = lambda key: re.findall(rf"^{{key}}=(.*)$", text, re.M)
    for credential in said("LoadCredential"):
        shutil.copy(credential.split(":")[1], credentials / credential.split(":")[0])
    environment = dict(each.split("=", 1) for line in said("Environment") for each in shlex.split(line))
    with Path("/run", f"{{unit}}.log").open("w") as log:
        command = shlex.split(said("ExecStart")[0])
        subprocess.Popen(command, env={{**os.environ, **environment}}, stdout=log, stderr=log, start_new_session=True)
'''


class Machine:
    def __init__(self, process: "subprocess.Popen[str]", programs: Path) -> None:
        (self.first,) = psutil.Process(process.pid).children()
        self._programs = programs

    def run(self, script: str, check: bool = True) -> str:
        """What it says when it carries this out."""
        inside = ["nsenter", "--target", str(self.first.pid), "--mount", "--net", "--pid", "--wd=" + str(ROOT)]
        path = f"{self._programs}:{os.environ['PATH']}"
        done = subprocess.run(
            [*inside, "sh", "-eu"], input=script, env={**os.environ, "PATH": path}, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, (script, done.stdout, done.stderr)
        return done.stdout if done.returncode == 0 else ""


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    disk = Path(tempfile.mkdtemp(dir=folder))
    apart = shlex.split("unshare --mount --net --pid --fork --kill-child --mount-proc --propagation private")
    command = [*apart, "sh", "-c", MACHINE, "sh", str(disk), str(folder / "openbook")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            pytest.skip("needs the right to make namespaces and mounts")
        yield Machine(process, folder)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def folder() -> Iterator[Path]:
    """With the programs that machines have; not below /tmp, where paths of sockets would become too long."""
    with tempfile.TemporaryDirectory(prefix="ob-", dir="/var/tmp") as name:
        for program, text in (("openbook", OPENBOOK), ("systemctl", SYSTEMCTL)):
            path = Path(name, program)
            path.write_text(text.format(python=sys.executable))
            path.chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root, and ip (iproute2)")
def test_two_machines_answer_as_the_page_says(folder: Path) -> None:
    on_the_first, on_the_other = blocks("docs/deploy.md", HEADING)
    (secrets,) = blocks("docs/deploy.md", "One file says it")[1:2]
    with ExitStack() as stack:
        index, endpoint = (stack.enter_context(machine(folder)) for _ in range(2))
        cable = ["ip", "link", "add", "eth0", "netns", str(index.first.pid), "type", "veth", "peer", "name", "eth0"]
        subprocess.run([*cable, "netns", str(endpoint.first.pid)], check=True)
        for each, address in ((index, INDEX), (endpoint, ENDPOINT)):
            each.run(f"ip addr add {address}/24 dev eth0; ip link set eth0 up")
        endpoint.run(f"export SECRETS={folder}/secrets; {secrets}")
        for each in (index, endpoint):
            each.run(f"cp {folder}/secrets/*.pem /etc/openbook/tls/")
        (folder / "documents.jsonl").write_text(DOCUMENT)
        index.run(f"openbook build {folder}/documents.jsonl --out /srv/openbook/snapshot --shards 2")
        index.run(on_the_first)
        keys = "access: {keys: file, path: /etc/openbook/keys.jsonl}"
        endpoint.run(f"echo '{keys}' >/etc/openbook/openbook.yaml")
        endpoint.run(f"printf '{INDEX}:7000\\n{INDEX}:7001\\n' >/etc/openbook/servers")
        key = endpoint.run("openbook keys add me --config /etc/openbook/openbook.yaml 2>/dev/null").strip()
        endpoint.run(on_the_other)
        ask = f'openbook ask "who invented the telephone?" --server {ENDPOINT}:9000 --tls-ca /etc/openbook/tls/ca.pem'
        while not (said := index.run(f"OPENBOOK_API_KEY={key} {ask}", check=False)):
            assert endpoint.run("pgrep -f 'openbook.cli up'", check=False), endpoint.run("cat /run/openbook.log")
            time.sleep(0.5)
    assert "Bell" in said
