"""Decoding beside transformers' RAG classes: same weights, same thread, in turn, CPU time, outputs asserted identical.

    python benchmarks/bench_decode.py [--real 180] [--padded 300] [--d-model 512] [--repeat 3] [--dtype float32]

transformers gets the attention mask that its RAG-Sequence forgets; what padding costs it, it pays. The weights are
random: decoding time does not depend on what they say. Prints a table, and one JSON line.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
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

from openbook.core.types import Formulation, GenerationSettings
from openbook.models.decoding import Seq2Seq, generate

# formulation, beams, passages
CASES = [
    (Formulation.TOKEN, 4, 5),
    (Formulation.TOKEN, 4, 10),
    (Formulation.SEQUENCE, 4, 5),
    (Formulation.SEQUENCE, 4, 10),
    (Formulation.SEQUENCE, 1, 50),
]
PAD, EOS = 1, 2


def build(args: argparse.Namespace) -> Any:
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
    return model.to(getattr(torch, args.dtype))


def rag(model: Any, formulation: Formulation, k: int) -> Any:
    """transformers' class around the same generator."""
    small = DPRConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8)
    config = RagConfig.from_question_encoder_generator_configs(small, model.config, n_docs=k)
    kind = RagTokenForGeneration if formulation is Formulation.TOKEN else RagSequenceForGeneration
    return kind(config=config, question_encoder=DPRQuestionEncoder(small), generator=model).eval()


def theirs(oracle: Any, ids: Tensor, mask: Tensor, scores: Tensor, settings: GenerationSettings) -> list[list[int]]:
    """transformers' answers, decoder start and padding removed."""
    k = scores.shape[1]
    starts = iter(range(0, len(ids), k))
    original = oracle.generator.generate

    def with_mask(inputs: Tensor, **kwargs: Any) -> Tensor:
        start = next(starts)
        kwargs["attention_mask"] = mask[start : start + k]
        answers: Tensor = original(inputs, **kwargs)
        return answers

    oracle.generator.generate = with_mask
    try:
        rows = oracle.generate(
            context_input_ids=ids,
            context_attention_mask=mask,
            doc_scores=scores,
            num_beams=settings.n_beams,
            max_length=settings.max_new_tokens + 1,
            pad_token_id=PAD,
            eos_token_id=EOS,
            decoder_start_token_id=EOS,
        )
    finally:
        del oracle.generator.generate
    return [[token for token in row[1:] if token != PAD] for row in rows.tolist()]


def measure(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and what came out."""
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("real", 180), ("padded", 300), ("d-model", 512), ("layers", 6), ("vocabulary", 50265)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("questions", 2), ("new-tokens", 16), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = build(args)
    reader = Seq2Seq(model)
    rows = []
    for formulation, n_beams, k in CASES:
        n = args.questions if k < 50 else 1
        random = torch.Generator().manual_seed(k)
        ids = torch.randint(5, args.vocabulary, (n * k, args.padded), generator=random)
        lengths = torch.randint(args.real * 2 // 3, args.real + 1, (n * k, 1), generator=random)
        lengths[::k] = args.real
        mask = (torch.arange(args.padded) < lengths).long()
        ids, scores = ids.masked_fill(mask == 0, PAD), torch.randn(n, k, generator=random)
        settings = GenerationSettings(formulation=formulation, n_beams=n_beams, max_new_tokens=args.new_tokens)
        oracle = rag(model, formulation, k)
        ours_s, theirs_s = [], []
        for _ in range(args.repeat):
            seconds, answers = measure(lambda: generate(reader, ids, mask, scores, settings))  # noqa: B023
            ours_s.append(seconds)
            seconds, wanted = measure(lambda: theirs(oracle, ids, mask, scores, settings))  # noqa: B023
            theirs_s.append(seconds)
            identical = [list(answer.token_ids) for answer in answers] == wanted
            if not identical:
                sys.exit(f"{formulation} with {n_beams} beams and {k} passages: answers differ")
        rows.append((str(formulation), n_beams, k, min(ours_s) / n, min(theirs_s) / n))
    _report(rows, args)


def _report(rows: list[tuple[str, int, int, float, float]], args: argparse.Namespace) -> None:
    print(f"{'formulation':<12}{'beams':>6}{'passages':>10}{'ours s':>10}{'theirs s':>10}{'times':>8}")
    for formulation, n_beams, k, ours_s, theirs_s in rows:
        print(f"{formulation:<12}{n_beams:>6}{k:>10}{ours_s:>10.2f}{theirs_s:>10.2f}{theirs_s / ours_s:>8.1f}")
    fields = ("formulation", "n_beams", "k", "ours_cpu_s", "transformers_cpu_s")
    summary = {
        "benchmark": "decode",
        "settings": vars(args),
        "cases": [dict(zip(fields, row, strict=True)) for row in rows],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
