"""`ray up` walked: three machines that stand, from nothing to an answered question, and back to nothing.

    make walk-cluster
    python tests/walk_cluster.py --without-faults  # what the tests run: up, up again, down

A machine is a namespace of its own (network, mounts, processes, name) with its own sshd on a bridge; its disk is this
machine's as it stands, and what it writes stays its own, in memory. Needs root on Linux, openssh-server, rsync,
openssl, iproute2. Ends everything that it starts, however it ends. What it says is the transcript in docs/deploy.md.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from openbook.core.types import Answer

ROOT = Path(__file__).parents[1]
WALK = Path(os.environ.get("OPENBOOK_WALK", "/var/tmp/openbook-walk"))
HEAD, WORKERS, ADDED = "10.77.0.1", ("10.77.0.2", "10.77.0.3"), "10.77.0.4"
HOSTS = (HEAD, *WORKERS)
OPERATOR = "10.77.0.254"
SHARDS, KEYS = (7000, 7001), 6381
"""Ports of the index servers, and of the Redis that has the keys."""
QUESTION = "Who invented the telephone?"
BEGAN = time.monotonic()
WITHIN_S = 600.0
WITHOUT_FAULTS = "--without-faults"
HEADLESS_S = 10 if WITHOUT_FAULTS in sys.argv else 60
"""After which Ray ends on a worker whose head is gone. A minute unless it is told otherwise: a test waits less."""
OURS = ("sshd", "/usr/sbin/sshd", "ps -eo", "bash -c ps", "sleep ", "[")

INSTALL = """\
set -eu
if ! test -x ~/openbook/bin/openbook; then
  {python} -m venv --without-pip ~/openbook
  into=$(ls -d ~/openbook/lib/python*/site-packages)
  cp -a {package}/. $into
  echo {site} >$into/needs.pth
  for each in ray:ray.scripts.scripts openbook-haproxy:openbook.serving.launch.haproxy openbook:openbook.cli; do
    printf '#!%s\\nfrom %s import main\\nmain()\\n' ~/openbook/bin/python ${{each#*:}} >~/openbook/bin/${{each%%:*}}
    chmod +x ~/openbook/bin/${{each%%:*}}
  done
fi
"""

HOST = """
set -eu
here=$1
mount --make-rprivate /
mkdir -p "$here/up" "$here/root"
rm -rf "$here/work"
mkdir "$here/work"
mount -t overlay overlay -o lowerdir=/,upperdir="$here/up",workdir="$here/work" "$here/root"
root=$here/root
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=2g tmpfs "$root/dev/shm"
mount -t sysfs sysfs "$root/sys" || mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
for each in tmp run; do mount -t tmpfs -o mode=1777 tmpfs "$root/$each"; done
mkdir -p "$root/run/sshd" "$root/root/.ssh"
rm -f "$root/root/.bashrc" "$root/root/.profile"  # what ours say at the start is in no answer
touch "$root/run/began"
cp "$2/id.pub" "$root/root/.ssh/authorized_keys"
chmod 700 "$root/root/.ssh"
chmod 600 "$root/root/.ssh/authorized_keys"
hostname "$3"
echo "$4 $3" >>"$root/etc/hosts"
ip link set lo up
read -r _  # the operator has put our end of the cable here
ip addr add "$4/24" dev eth0
ip link set eth0 up
exec chroot "$root" /usr/sbin/sshd -D -e -o HostKey="$2/host" -o PermitRootLogin=prohibit-password -o UsePAM=no \
  -o StrictModes=no -o PidFile=none -o SetEnv=RAY_gcs_rpc_server_reconnect_timeout_s="$5"
"""


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


def run(*command: str, **options: object) -> str:
    """What it said. Ends the walk if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return str(done.stdout)


def openbook(*arguments: str) -> str:
    return run(sys.executable, "-m", "openbook.cli", *arguments)


def ray(*arguments: str) -> str:
    say(f"$ ray {shlex.join(arguments)}")
    return run(sys.executable, "-m", "ray.scripts.scripts", *arguments, cwd=WALK, stdin=subprocess.DEVNULL)


class Host:
    """A machine."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.name = f"host{address.rpartition('.')[2]}"
        self.folder = WALK / self.name
        self.folder.mkdir()
        run("mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", str(self.folder))  # its disk, empty
        self.start()

    def start(self) -> None:
        """Switch it on."""
        log = (WALK / f"{self.name}.log").open("ab")
        command = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        command += ["sh", "-c", HOST, "sh", str(self.folder), str(WALK), self.name, self.address, str(HEADLESS_S)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        here = f"v{self.name}"
        while os.readlink(f"/proc/{self.process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.05)
        run("ip", "link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", str(self.process.pid))
        run("ip", "link", "set", here, "master", "bridge0", "up")
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def kill(self) -> None:
        """As if somebody pulled the plug."""
        self.process.kill()
        self.process.wait()

    def ssh(self, command: str) -> str:
        return run(
            *("ssh", "-i", f"{WALK}/id", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
            *("-o", "LogLevel=ERROR", f"root@{self.address}", command),
        )

    def listens(self, *ports: int) -> bool:
        """Whether somebody does at each of these ports; with none, its sshd."""
        try:
            for port in ports or (22,):
                socket.create_connection((self.address, port), 1).close()
        except OSError:
            return False
        return True

    def processes(self) -> dict[int, str]:
        """Of this machine, its sshd and what we ask it with apart."""
        rows = self.ssh("ps -eo pid=,args=").splitlines()
        found = {int(row.split()[0]): " ".join(row.split()[1:]) for row in rows}
        return {pid: args for pid, args in found.items() if not args.startswith(OURS)}

    def index_servers(self) -> set[int]:
        """Those that run here."""
        try:
            found = self.processes()
        except SystemExit:  # its sshd does not answer yet
            return set()
        return {pid for pid, args in found.items() if "openbook.cli index serve" in args and " -c " not in args}

    def files(self) -> list[str]:
        """What it wrote below its home and /tmp, and is not as it was."""
        found = self.ssh("find /root /tmp -mindepth 1 -maxdepth 1 -newer /run/began").split()
        return sorted(path for path in found if path != "/root/.ssh" and not self.as_it_was(path))

    def as_it_was(self, path: str) -> bool:
        """Whether a file has the bytes that it has on this machine."""
        return Path(path).is_file() and self.ssh(f"cat {path}") == Path(path).read_text()


@contextmanager
def hosts() -> Iterator[list[Host]]:
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "bridge0", "type", "bridge")
    run("ip", "addr", "add", f"{OPERATOR}/24", "dev", "bridge0")
    run("ip", "link", "set", "bridge0", "up")
    for name in ("id", "host"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(WALK / name))
    made = [Host(address) for address in HOSTS]
    try:
        yield made
    finally:
        for host in made:
            host.kill()


def render(n_replicas: int, workers: tuple[str, ...] = WORKERS) -> None:
    """All files, from the topology that a user writes."""
    (WALK / "topology.yaml").write_text(yaml.safe_dump(topology(n_replicas, workers), sort_keys=False))
    openbook("deploy", "render", str(WALK / "topology.yaml"), "--out", str(WALK))


def topology(n_replicas: int, workers: tuple[str, ...]) -> dict[str, object]:
    """What a user writes, n_replicas of the endpoint. `install` takes what openbook needs from this machine's
    environment, to download nothing.
    """
    site = next(path for path in sys.path if path.endswith("site-packages"))
    (WALK / "install.sh").write_text(INSTALL.format(python=sys.executable, package=WALK / "package", site=site))
    return {
        # Of two walks at once each has its own: by it, and the address, Ray finds its connections over ssh in /tmp.
        "name": f"walk-{zlib.crc32(str(WALK).encode()):x}",
        "index": {
            "shards": 2,
            "replicas": 2,
            "threads": 1,
            "fetch": f"test -e ~/openbook/snapshot || cp -r {WALK}/snapshot ~/openbook/snapshot",
        },
        "endpoint": {"settings": {"access": {"keys": "redis"}, "serving": {"n_replicas": n_replicas}}},
        "on_premise": {
            "head": HEAD,
            "workers": list(workers),
            "ssh_user": "root",
            "ssh_key": f"{WALK}/id",
            "install": f"sh {WALK}/install.sh",
            "worker_cpus": 1,
        },
    }


def over_http(key: str) -> tuple[int, str]:
    """The status, and the answer if there is one."""
    import httpx

    trusted = ssl.create_default_context(cafile=WALK / "deploy/secrets/ca.pem")
    headers = {"x-api-key": key} if key else {}
    asked = {"question": QUESTION}
    reply = httpx.post(f"https://{HEAD}:8000/v1/answer", json=asked, headers=headers, verify=trusted, timeout=60)
    return reply.status_code, reply.json().get("answer", "")


def asked(key: str, min_coverage: float = 1.0) -> "Answer | None":
    """What comes back, if that is an answer."""
    from openbook.client import Client
    from openbook.errors import OpenbookError

    try:
        with Client(f"{HEAD}:9000", 10, key, tls_ca=str(WALK / "deploy/secrets/ca.pem")) as client:
            return client.answer(QUESTION, min_coverage=min_coverage)
    except OpenbookError as error:
        (WALK / "last-failure").write_text(f"{type(error).__name__}: {error}")
        return None


def answered(key: str) -> str:
    """The answer, or nothing."""
    answer = asked(key)
    return answer.text if answer else ""


@contextmanager
def asking(key: str, min_coverage: float = 1.0) -> Iterator[None]:
    """Questions one after the other while something happens; then what became of them."""
    stopping, took, came = threading.Event(), list[float](), Counter[str]()

    def ask() -> None:
        while not stopping.is_set():
            begun = time.monotonic()
            answer = asked(key, min_coverage)
            took.append(time.monotonic() - begun)
            came["failed" if answer is None else "whole" if answer.complete else "half"] += 1
            stopping.wait(0.1)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
    half = f", {came['half']} answered from the other half" if min_coverage < 1 else ""
    say(f"meanwhile {len(took)} questions, {came['failed']} of them failed{half}; the slowest took {max(took):.1f} s")


def until(what: str, holds: "object", within_s: float = WITHIN_S) -> None:
    give_up = time.monotonic() + within_s
    while not holds():  # type: ignore[operator]
        if time.monotonic() > give_up:
            raise SystemExit(f"not within {within_s:.0f} s: {what}")
        time.sleep(1)
    say(what)


def evidence(made: list[Host]) -> str:
    """Why no question is answered: the last failure, and the ends of what deployed, of Serve and of the autoscaler."""
    logs = "/tmp/ray/session_latest/logs"
    ends = f"tail -vn 20 ~/openbook/deploy.log {logs}/serve/controller_*.log {logs}/monitor.out || true"
    failure = WALK / "last-failure"
    last = failure.read_text() if failure.exists() else "no question was asked"
    return "\n".join([last, made[0].ssh(ends), *(str(each.processes()) for each in made)])


def settled(made: list[Host]) -> list[dict[int, str]]:
    """The processes of all, once nothing begins or ends any more."""

    def lasting() -> list[dict[int, str]]:
        return [{pid: args for pid, args in host.processes().items() if "ray::IDLE" not in args} for host in made]

    found, give_up = lasting(), time.monotonic() + WITHIN_S
    while time.monotonic() < give_up:
        time.sleep(10)
        now = lasting()
        if [each.keys() for each in now] == [each.keys() for each in found]:
            return now
        found = now
    raise SystemExit(f"processes begin and end for {WITHIN_S:.0f} s: {found}")


def walk(faults: bool) -> None:
    say("three machines with sshd and nothing else; here a wheel of openbook and a snapshot of two shards")
    n_replicas = 2 if faults else 1
    with hosts() as made:
        head = made[0]
        for host in made:
            until(f"{host.name} lets us in", host.listens, 60)
        say("$ openbook deploy render topology.yaml; sh deploy/secrets.sh 10.77.0.1")
        render(n_replicas)
        run("sh", str(ROOT / "deploy/secrets.sh"), HEAD, env={**os.environ, "SECRETS": str(WALK / "deploy/secrets")})
        begun = time.monotonic()
        (WALK / "up.log").write_text(ray("up", "-y", "deploy/ray/on-premise.yaml"))
        say("`ray up` has returned")
        settings = "OPENBOOK_ACCESS__KEYS=redis OPENBOOK_ACCESS__URL=$(~/openbook/bin/openbook deploy keys-url)"
        add = f"{settings} ~/openbook/bin/openbook keys add walker 2>/dev/null"
        say("$ ssh head: openbook keys add walker")
        keys, answers = list[str](), list[str]()
        try:
            until("the Redis of the keys listens", lambda: head.listens(KEYS), 300)  # to ask costs nothing
            until("the Redis of the keys has it", lambda: keys.append(head.ssh(f"{add} || true")) or keys[-1], 300)
            key = keys[-1].strip()
            until("a question is answered", lambda: answers.append(answered(key)) or answers[-1])
        except SystemExit:
            say(evidence(made))
            raise
        say(f"{QUESTION} {answers[-1]}")
        say(f"from nothing to an answer: {time.monotonic() - begun:.0f} s")
        until(
            "both workers serve both shards",
            lambda: all("--shard 1" in str(host.processes()) for host in made[1:]),
            120,
        )

        until("the first deployment has ended", lambda: "deploy serve" not in str(head.processes()), 120)
        # HAProxy is no matter of ours: Serve replaces it for each replica that joins, however late that is.
        before = settled(made)
        (WALK / "again.log").write_text(ray("up", "-y", "deploy/ray/on-premise.yaml"))
        until("the second deployment has ended", lambda: "deploy serve" not in str(head.processes()), 120)
        for host, was in zip(made, before, strict=True):
            now = host.processes()
            gone = sorted(args for pid, args in was.items() if pid not in now and "/openbook/run/" not in args)
            say(f"{host.name}: {len(was)} processes before, of which are gone: {', '.join(gone) or 'none'}")
            assert not gone
        until("a question is answered again", lambda: answered(key), 60)
        refused, same = over_http(""), over_http(key)
        say(f"over HTTP: {refused[0]} without a key; with it {same[0]}, {same[1]}")
        assert (refused, same) == ((401, ""), (200, answers[-1]))
        ours = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/openbook/secrets/ray-token"
        serve = "openbook deploy serve ~/openbook/serve.yaml --index-nodes 9 --shards 2 --timeout 0"
        say(f"$ ssh head: {serve}")
        said = head.ssh(f"{ours} ~/openbook/bin/{serve} 2>&1 || true").splitlines()[-1]
        say(said)
        assert "the index tier is not there after 0 s: 4 of 18 servers" in said

        killed = min(made[1].index_servers())
        say(f"$ ssh {made[1].name}: kill -9 {killed}, an index server")
        made[1].ssh(f"kill -9 {killed}")
        until("another one is in its place", lambda: len(made[1].index_servers() - {killed}) == 2, 120)
        assert answered(key)
        if faults:
            suffer(made, key)
            grow(made, key, n_replicas)

        (WALK / "down.log").write_text(ray("down", "-y", "deploy/ray/on-premise.yaml"))
        say("`ray down` has returned")
        for host in made:
            try:
                until(f"{host.name}: no process left", lambda host=host: not host.processes(), 300)
            except SystemExit:
                say(f"{host.name}: {host.processes()}")
                raise
            left = host.files()
            say(f"{host.name}: files left: {' '.join(left)}")
            assert left == ["/root/openbook"]


def suffer(made: list[Host], key: str) -> None:
    """What may befall machines, while questions are asked."""
    # A worker without a replica of the endpoint: between the two stand only index servers.
    far = next((host for host in made[1:] if "ServeReplica" not in str(host.processes())), made[1])
    say(f"the cable of {far.name}, which has half of the index servers, is out for ten seconds")
    with asking(key):
        run("ip", "link", "set", f"v{far.name}", "down")
        time.sleep(10)
        run("ip", "link", "set", f"v{far.name}", "up")
        time.sleep(5)

    say("shard 1 of both workers can be reached from no other machine for ten seconds; half the passages are enough")
    with asking(key, min_coverage=0.5):
        for host in made[1:]:
            host.ssh(f"ip rule add ipproto tcp sport {SHARDS[1]} blackhole")
        time.sleep(10)
        for host in made[1:]:
            host.ssh(f"ip rule del ipproto tcp sport {SHARDS[1]} blackhole")
        time.sleep(5)
    until("a question is answered from all passages", lambda: answered(key), 30)

    say(f"$ ssh {far.name}: pkill -9 raylet")
    before = far.index_servers()
    with asking(key):
        far.ssh("pkill -9 -x raylet")
        until(
            "Ray runs there again, and serves both shards",
            lambda: len(far.index_servers() - before) == 2 and far.listens(*SHARDS),
        )
        time.sleep(10)  # for endpoints that look every few seconds

    lost = made[2]
    say(f"{lost.name} loses its power")
    with asking(key):
        lost.kill()
        time.sleep(30)
    lost.start()
    say(f"{lost.name} is there again")
    until(f"{lost.name} serves both shards", lambda: lost.listens(*SHARDS))
    with asking(key):
        time.sleep(10)


def grow(made: list[Host], key: str, n_replicas: int) -> None:
    """One machine more, while questions are asked."""
    added = Host(ADDED)
    made.append(added)  # from now on it is one of them, also after `ray down`
    until(f"{added.name} lets us in", added.listens, 60)
    say("$ openbook deploy render topology.yaml, which has one worker more")
    render(n_replicas, (*WORKERS, ADDED))
    with asking(key):
        (WALK / "grown.log").write_text(ray("up", "-y", "deploy/ray/on-premise.yaml"))
        until(f"{added.name} serves both shards", lambda: added.listens(*SHARDS))
        time.sleep(10)  # for endpoints that look every few seconds


def main() -> None:
    if os.environ.get("OPENBOOK_WALKING") != "1":
        shutil.rmtree(WALK, ignore_errors=True)
        WALK.mkdir(mode=0o755)
        (WALK / "tmp").mkdir()
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(WALK), str(ROOT))
        package = WALK / "package"
        run(sys.executable, "-m", "zipfile", "-e", str(next(WALK.glob("*.whl"))), str(package))
        # What one host would compile, all would: what is compiled here they copy, with the times of its sources.
        run(sys.executable, "-c", "import openbook.index.shard.inverted, openbook.index.shard.rescoring")
        shutil.copytree(ROOT / "services/openbook/index/shard", package / "openbook/index/shard", dirs_exist_ok=True)
        documents = "\n".join(json.dumps(each) for each in DOCUMENTS)
        (WALK / "documents.jsonl").write_text(documents)
        openbook("build", str(WALK / "documents.jsonl"), "--out", str(WALK / "snapshot"), "--shards", "2")
        environment = {
            **os.environ,
            "OPENBOOK_WALKING": "1",
            "RAY_TMPDIR": str(WALK / "tmp"),
            "TMPDIR": str(WALK / "tmp"),
        }
        environment |= {"RAY_USAGE_STATS_ENABLED": "0"}
        apart = shlex.split("setpriv --pdeathsig KILL unshare --mount --net --pid --fork --kill-child --mount-proc")
        walking = subprocess.Popen([*apart, sys.executable, *sys.argv], env=environment)
        try:
            code = walking.wait()
        except KeyboardInterrupt:
            walking.send_signal(signal.SIGKILL)
            code = walking.wait()
        sys.exit(code)
    walk(faults=WITHOUT_FAULTS not in sys.argv)


DOCUMENTS = [
    {"id": "bell", "title": "Telephone", "text": "The telephone was invented by Alexander Graham Bell in 1876."},
    {"id": "curie", "title": "Marie Curie", "text": "Marie Curie was born in Warsaw in 1867."},
    {"id": "everest", "title": "Mount Everest", "text": "Mount Everest is the highest mountain on Earth."},
    {"id": "nile", "title": "Nile", "text": "The Nile is a river in Africa, and the longest of all."},
]

if __name__ == "__main__":
    main()
