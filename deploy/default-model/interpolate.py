"""A reader between two: each weight (1 - SHARE) of one and SHARE of the other, which was trained from it.

    python deploy/default-model/interpolate.py FROM TO SHARE OUT

FROM, TO and OUT are folders of readers that stand on the embedded encoder. What fine-tuning gains is kept in part, and
so is what it loses (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models", section 3).
"""

import hashlib
import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS, DECLARED = "model.safetensors", "openbook.json"

if __name__ == "__main__":
    start, end, out = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[4])
    share = float(sys.argv[3])
    out.mkdir(parents=True)
    before, after = load_file(start / WEIGHTS), load_file(end / WEIGHTS)
    between = {name: ((1 - share) * before[name].float() + share * after[name].float()).half() for name in before}
    save_file(between, out / WEIGHTS)
    declared = json.loads((end / DECLARED).read_text())
    declared["sha256"] = hashlib.sha256((out / WEIGHTS).read_bytes()).hexdigest()
    (out / DECLARED).write_text(json.dumps(declared, indent=2) + "\n")
