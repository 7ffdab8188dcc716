"""Requests made from the description at /openapi.json, in all phases of schemathesis: is every reply a described one?

    python benchmarks/bench_described.py [--examples 1800] [--seed 1] [--only PATH]

The phases: examples that the description gives, the edges of its schemas (coverage), random requests (fuzzing), and
requests that follow from replies to others (stateful). `--examples` are for each operation, and for each phase that is
random. The endpoint listens on a port; its models are fakes. /mcp apart: its library refuses what is no JSON-RPC in
plain text. Ends with schemathesis's own summary, and its exit code: 0 if every reply was a described one.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

SERVING = Path(__file__).parents[1] / "tests/unit/serving"
sys.path.insert(0, str(SERVING))

from described import DESCRIBED  # noqa: E402
from small_endpoint import on_a_port, service  # noqa: E402

from openbook.serving.endpoint.http import build_app  # noqa: E402

PHASES = "examples,coverage,fuzzing,stateful"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1800)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="PATH", help="requests to this one alone")
    args = parser.parse_args()
    paths = os.pathsep.join([str(SERVING), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "described", "PYTHONPATH": paths}
    command = [str(Path(sys.executable).with_name("st")), "run", "--exclude-path", "/mcp", "--phases", PHASES]
    command += ["--checks", ",".join(each.__name__ for each in DESCRIBED)]
    command += ["--max-examples", str(args.examples), "--seed", str(args.seed)]
    command += ["--include-path", args.only] if args.only else []
    with on_a_port(build_app(service())) as url:
        done = subprocess.run([*command, f"{url}/openapi.json"], env=environment, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
