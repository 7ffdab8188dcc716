"""All that only a GPU can tell, measured and checked within eight minutes, with torch and transformers alone.

    PYTHONPATH=services python benchmarks/bench_gpu.py [--out var/gpu.md] [--only decoding steps] [--tiny]

Decoder and losses beside the CPU's and beside transformers' RAG classes, a training step, encoding as a share of bare
forward passes, the generator's throughput, and the memory of each: BART-large's shape with random weights, which for
RAG-Sequence is the worst case, as no candidate stands out. Every part has a time budget; what it has no time for, or no
memory, is said. A part that fails is reported, and the others go on. Writes one page of Markdown, anew after every
part, and prints one JSON line; ends with 1 if a check did not pass. `--tiny` is all of it in seconds on a CPU, to see
that it runs: its figures mean nothing.

Encoder and training step also need pydantic, which comes with openbook; nothing needs Ray, FAISS, gRPC or Numba.
"""

import argparse
import gc
import importlib
import json
import math
import os
import shlex
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/unit/models"))  # the questions of `make identity`

import torch
import transformers
from gpu.page import machine, page, summary, verdict
from gpu.part import TINY, Part, Sizes
from rag_side_by_side import build

PARTS = {
    "answers": ("Answers in float64, tiny models: openbook on the GPU, on the CPU, alone, and transformers", 50),
    "losses": ("Loss and its gradients, beside the CPU and transformers", 40),
    "decoding": ("Decoding, beside transformers", 120),
    "steps": ("A training step, beside transformers", 35),
    "embeddings": ("Encoding passages, beside bare forward passes", 30),
    "building": ("Encoding as a build does, beside bare forward passes over perfect batches", 75),
    "throughput": ("Questions a second, all in one batch", 40),
}
"""What each does, and its seconds: 390 in all, and 90 for the start and for what is under way when a budget ends."""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; 0 if all of them passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("var/gpu.md"), help="the page")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--tiny", action="store_true", help="at tiny size, on a CPU unless told otherwise")
    parser.add_argument("--device", help="cuda, or cpu with --tiny")
    args = parser.parse_args(arguments)
    device = torch.device(args.device or ("cpu" if args.tiny else "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("bench_gpu: torch sees no GPU; --tiny runs on a CPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    transformers.logging.set_verbosity_error()
    sizes, n_threads = TINY if args.tiny else Sizes(), 1 if args.tiny else os.cpu_count() or 1
    command = shlex.join(["python", "benchmarks/bench_gpu.py", *(sys.argv[1:] if arguments is None else arguments)])
    generator, described, parts = build(sizes), machine(device), []
    for name in args.only:
        torch.set_num_threads(n_threads)  # what the last part imported may have set it
        does, budget_s = PARTS[name]
        parts.append(Part(name, does, math.inf if args.tiny else budget_s, sizes, device, generator))
        run(parts[-1])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page(parts, command, described))
    print(f"the page: {args.out}")
    print(json.dumps({"benchmark": "gpu", "tiny": args.tiny, "machine": described, "parts": summary(parts)}))
    return 0 if all(part.passed for part in parts) else 1


def run(part: Part) -> None:
    """One part, whatever happens in it."""
    print(f"{part.name}: {part.does}; {part.budget_s:.0f} s at most", flush=True)
    begun = time.monotonic()
    try:
        importlib.import_module(f"gpu.{part.name}").run(part)
    except Exception as error:
        part.error = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    part.seconds = time.monotonic() - begun
    print(f"  {verdict(part)} in {part.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    gc.freeze()  # what was imported stays: looking through it takes a third of a second, before every measurement
    sys.exit(main())
