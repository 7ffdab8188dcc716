"""A reader between several: the mean of their weights, each by its share.

    python deploy/default-model/interpolate.py OUT 0.25=FOLDER 0.75=FOLDER

The folders are of readers that stand on the embedded encoder and were trained from one another. What fine-tuning
gains is kept in part, and so is what it loses (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models",
section 3, and "Model soups", section 2).
"""

import hashlib
import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHTS, DECLARED = "model.safetensors", "openbook.json"

if __name__ == "__main__":
    out = Path(sys.argv[1])
    shares = [(Path(folder), float(share)) for share, folder in (part.split("=", 1) for part in sys.argv[2:])]
    if abs(sum(share for _, share in shares) - 1) > 1e-6:
        sys.exit(f"interpolate: the shares must add up to 1, got {sum(share for _, share in shares):g}")
    out.mkdir(parents=True)
    parts = [(load_file(folder / WEIGHTS), share) for folder, share in shares]
    between = {name: sum(share * part[name].float() for part, share in parts).half() for name in parts[0][0]}
    save_file(between, out / WEIGHTS)
    declared = json.loads((shares[0][0] / DECLARED).read_text())
    declared["sha256"] = hashlib.sha256((out / WEIGHTS).read_bytes()).hexdigest()
    (out / DECLARED).write_text(json.dumps(declared, indent=2) + "\n")
