"""What the benchmarks beside transformers' RAG classes share: a random BART, a batch, a process for every case."""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DPRConfig,
    DPRQuestionEncoder,
    RagConfig,
    RagSequenceForGeneration,
    RagTokenForGeneration,
)

from openbook.core.types import Formulation

PAD, EOS = 1, 2
THEIRS = "transformers"
SIZES = {"d-model": 512, "layers": 6, "vocabulary": 50265}
BATCH = {"questions": 8, "passages": 10, "target": 25, "padded": 300}

Measure = Callable[[argparse.Namespace, Formulation, str], dict[str, Any]]
"""What one process does for a formulation and one of the contestants: `cpu_s`, `peak_mb`, and what must be equal."""


def build(args: Any) -> Any:
    """A BART that answers at random."""
    torch.manual_seed(0)
    config = BartConfig(
        d_model=args.d_model,
        encoder_layers=args.layers,
        decoder_layers=args.layers,
        encoder_attention_heads=args.d_model // 64,
        decoder_attention_heads=args.d_model // 64,
        encoder_ffn_dim=4 * args.d_model,
        decoder_ffn_dim=4 * args.d_model,
        vocab_size=args.vocabulary,
        init_std=0.05,
        forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config).eval()
    model.final_logits_bias[0, PAD] = -1e4  # transformers takes a generated pad for the end of the answer
    model.config.bos_token_id = None  # or it would leave BOS out of a candidate's score
    return model


def dpr(hidden: int = 8, layers: int = 1) -> Any:
    """A question encoder."""
    torch.manual_seed(1)
    heads = max(1, hidden // 64)
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * hidden}
    return DPRQuestionEncoder(DPRConfig(hidden_size=hidden, vocab_size=8 if hidden == 8 else 30522, **sizes)).eval()


def rag(model: Any, formulation: Formulation, k: int, question_encoder: Any = None) -> Any:
    """transformers' class around the same generator, and where that is."""
    encoder = question_encoder or dpr()
    config = RagConfig.from_question_encoder_generator_configs(encoder.config, model.config, n_docs=k)
    kind = RagTokenForGeneration if formulation is Formulation.TOKEN else RagSequenceForGeneration
    return kind(config=config, question_encoder=encoder, generator=model).eval().to(model.device)


@dataclass(frozen=True)
class Batch:
    """Questions with their passages, all of them of `--real` tokens, padded as transformers' retriever pads them."""

    ids: Tensor  # (n * k, l)
    mask: Tensor
    scores: Tensor  # (n, k)
    labels: Tensor  # (n, t), end-of-sequence last

    @classmethod
    def random(cls, args: Any) -> "Batch":
        n, k, t = args.questions, args.passages, args.target
        random = torch.Generator().manual_seed(0)
        mask = (torch.arange(args.padded) < args.real).long().repeat(n * k, 1)
        ids = torch.randint(5, args.vocabulary, (n * k, args.padded), generator=random).masked_fill(mask == 0, PAD)
        scores = torch.randn(n, k, generator=random)
        words = torch.randint(5, args.vocabulary, (n, t - 1), generator=random)
        return cls(ids, mask, scores, torch.cat([words, torch.full((n, 1), EOS)], 1))

    @property
    def labels_with_start(self) -> Tensor:
        """As transformers wants them."""
        return torch.cat([self.labels.new_full((len(self.labels), 1), EOS), self.labels], 1)

    def to(self, device: torch.device) -> "Batch":
        """The same there."""
        return Batch(*(tensor.to(device) for tensor in (self.ids, self.mask, self.scores, self.labels)))


def compare(
    doc: str | None,
    benchmark: str,
    others: Sequence[str],
    measure: Measure,
    equal: Mapping[str, float],
    real: Sequence[int] = (180,),
    **more: int,
) -> None:
    """Every contestant under both formulations in a process of its own; ends the program if results differ.

    `equal` names what must be equal to transformers', and how far it may be off, relatively, unless a result says so
    itself as `tolerance`. `real` tokens of a context are no padding. `more` are options with their defaults.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {**BATCH, **SIZES, **more}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--real", type=int, nargs="+", default=list(real))
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)  # formulation, whose, real: what one process does
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only:
        formulation, whose, args.real = args.only[0], args.only[1], int(args.only[2])
        print(json.dumps(measure(args, Formulation(formulation), whose)))
        return
    cases = [(n, formulation, whose) for n in args.real for formulation in Formulation for whose in (THEIRS, *others)]
    found = {case: _in_a_process(*case) for case in track(cases, "Cases", console=Console(stderr=True))}
    table = Table("real tokens", "formulation", "whose", "CPU s", "part", "MB", "part")
    for (n_real, formulation, whose), result in found.items():
        theirs = found[n_real, formulation, THEIRS]
        for name, tolerance in equal.items():
            np.testing.assert_allclose(result[name], theirs[name], rtol=result.get("tolerance", tolerance))
        figures = [(result[name], result[name] / theirs[name]) for name in ("cpu_s", "peak_mb")]
        table.add_row(str(n_real), formulation, whose, *(f"{figure:.2f}" for pair in figures for figure in pair))
    Console().print(table)
    summary = {
        "benchmark": benchmark,
        "settings": vars(args),
        "cases": [{"real": r, "formulation": f, "whose": whose, **result} for (r, f, whose), result in found.items()],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "load": os.getloadavg(),
    }
    print(json.dumps(summary))


def _in_a_process(n_real: int, formulation: Formulation, whose: str) -> dict[str, Any]:
    arguments = [sys.executable, *sys.argv, "--only", formulation, whose, str(n_real)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
