"""A build that is killed wherever it may be goes on to the very bytes of one that was left in peace: at a few points
here, at a hundred by `make bench-kills`.
"""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "benchmarks/bench_kills.py"


def test_killed_at_a_few_points_it_goes_on_to_the_same_bytes() -> None:
    command = [sys.executable, str(BENCH), "--kills", "3", "--documents", "2", "--seed", "99"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == []
    assert found["n_killed"] >= 2
