"""What Ray and Serve read from the environment on every node, whoever starts them."""

from math import ceil
from pathlib import PurePath

from openbook.config import AnswerDefaults


def longest_s(answer: AnswerDefaults) -> int:
    """Whatever a question may take, and some more; never less than by default, for settings change while it runs."""
    return ceil(max(answer.max_timeout_s, AnswerDefaults().max_timeout_s)) + 30


LONGEST_S = longest_s(AnswerDefaults())


def guards(within_s: int = LONGEST_S) -> dict[str, str]:
    """Against slow callers, busy machines, dead proxies and nodes, and answers cut off that take no longer than that;
    and `RAY_SERVE_HAPROXY_BINARY_PATH` names the program of `haproxy`.
    """
    return {
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "openbook.serving.endpoint.bodies.middlewares",
        # For a client that neither sends nor takes anything; who waits for an answer is not meant.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
        # Of a former process of HAProxy, which ends what it has begun. By default 120: whenever a replica comes or
        # goes, answers that take longer would be cut off.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(within_s),
        # By default 15: replicas and HAProxy would give way to all else on a machine with much to do, and hardly
        # answer.
        "RAY_worker_niceness": "0",
        # Where replicas do not say how long they take, see `soonest`: the one of two with fewer under way. By default
        # of all: a replica that refuses at once has none, and would get all that comes.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "random(2)",
        # A proxy that died is missed after three looks at it. By default they are 10 s apart.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # How often the controller looks at everything, and replicas hand on Serve's own figures, whether or not there
        # is anything new. By default ten times a second, which keeps 5 % of a core busy.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
        # A node whose raylet refuses connections is missed after five looks at it. By default they are 3 s apart. One
        # that is slow to answer has as long as ever.
        "RAY_health_check_period_ms": "1000",
        # What replicas write on standard error, a line for each request, is in a file of Ray's for each of them, and
        # by default grows for ever. Its other logs could come to gigabytes each. What is written passes a thread of the
        # same process, so of one that crashes the last words, such as Python's stack at SIGSEGV, may be missing.
        "RAY_ROTATION_MAX_BYTES": str(16 << 20),
        "RAY_ROTATION_BACKUP_COUNT": "3",
    }


MAX_FOLDER = 38
"""Characters of the path of `haproxy_files`' folder. HAProxy takes paths of sockets of 97: they are named by a letter,
below the 56 of a node's id."""


def haproxy_files(folder: PurePath) -> dict[str, str]:
    """Where HAProxy and who commands it meet: by default in a folder in /tmp, which anybody may make first. Serve makes
    a folder in it for each node.
    """
    files = {
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "c",  # commands
        "METRICS_SOCKET_PATH": folder / "m",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "server-state",
    }
    return {f"RAY_SERVE_HAPROXY_{name}": str(path) for name, path in files.items()}
