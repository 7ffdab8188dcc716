"""Passages encoded, tokenizer and copies included, beside bare forward passes over the very same batches."""

import copy
import random
from typing import Any
from unittest import mock

import numpy as np
import tiny_encoders
import torch
from transformers import BertConfig, BertModel, DPRConfig, DPRContextEncoder

from gpu.part import OUT_OF_MEMORY, Part, Sizes
from openbook.config import ModelSettings
from openbook.core.types import Float32, Passage
from openbook.models.encoder import EncoderCheckpoint, TextEncoder
from openbook.models.packing import GPU_BATCH_TOKENS
from openbook.models.pooling import Pooling

AT_ONCE = (16, GPU_BATCH_TOKENS // 128)
"""Passages of 128 tokens in a batch: few, and those of every build."""

LIMITS = {
    "float32": (1e-4, "TF32 is off: the same sums in another order, through all layers"),
    "bfloat16": (5e-2, "states and weights are rounded to 0.4 %, in every layer"),
}
"""For |a - b| / |b| of a vector."""

POOLINGS = {
    "DPR": Pooling("pooler", normalize=False, max_tokens=256, titles="pair"),
    "MiniLM": Pooling("mean", normalize=True, max_tokens=256, titles="joined"),
}


def run(part: Part) -> None:
    """Both shapes in both dtypes; the CPU encodes as many as are in a batch."""
    part.columns = ("shape", "dtype", "at once", "passages a second", "bare", "share of bare", "GB")
    tokenizer = tiny_encoders.bert_tokenizer([*tiny_encoders.BERT[:5], *(f"w{i}" for i in range(part.sizes.different))])
    passages = texts(part.sizes, part.sizes.encoded)
    for shape, pooling in POOLINGS.items():
        checkpoint = EncoderCheckpoint(model(shape, part, len(tokenizer)), tokenizer, pooling)
        some = passages[: AT_ONCE[0]]
        wanted = placed(checkpoint, "cpu", "float32").encode_passages(some)
        for dtype in LIMITS:
            ours = placed(checkpoint, str(part.device), dtype)
            limit, why = LIMITS[dtype]
            what = f"{shape}, {dtype}, vectors beside the CPU's in float32"
            part.check(what, distance(ours.encode_passages(some), wanted), limit, why)
            for at_once in AT_ONCE:
                if part.has_time_for(f"{shape}, {dtype}, {at_once} at once"):
                    row(part, shape, dtype, ours, passages, at_once)


def row(part: Part, shape: str, dtype: str, ours: TextEncoder, passages: list[Passage], at_once: int) -> None:
    """The batches are those that our encoder asked of the model."""
    batches: list[dict[str, Any]] = []

    @torch.inference_mode()
    def bare() -> None:
        for batch in batches:
            ours._model(**batch)

    with mock.patch.object(ours._packing, "batch_tokens", 128 * at_once):
        ours.encode_passages(passages)  # tries every shape
        hook = ours._model.register_forward_pre_hook(lambda _, __, batch: batches.append(batch), with_kwargs=True)
        ours.encode_passages(passages)
        hook.remove()
        found, least = part.measured(lambda: ours.encode_passages(passages)), part.measured(bare)
    if found is None or least is None:
        part.row(shape, dtype, at_once, None, None, None, OUT_OF_MEMORY)
        return
    rates = len(passages) / found.seconds, len(passages) / least.seconds
    part.row(shape, dtype, at_once, *rates, rates[0] / rates[1], found.peak_gb)


def placed(checkpoint: EncoderCheckpoint, device: str, dtype: str) -> TextEncoder:
    """A copy of the encoder there."""
    settings = ModelSettings.model_validate({"device": device, "dtype": dtype, "n_threads": torch.get_num_threads()})
    own = EncoderCheckpoint(copy.deepcopy(checkpoint.model), checkpoint.tokenizer, checkpoint.pooling)
    return TextEncoder(own, settings)


def model(shape: str, part: Part, vocabulary: int) -> Any:
    """DPR's passage encoder, or MiniLM, with random weights."""
    width, layers = part.sizes.dpr if shape == "DPR" else part.sizes.minilm
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 12}
    sizes |= {"intermediate_size": 4 * width, "vocab_size": vocabulary, "max_position_embeddings": 512}
    torch.manual_seed(2)
    if shape == "DPR":
        return DPRContextEncoder(DPRConfig(**sizes)).eval()
    return BertModel(BertConfig(**sizes), add_pooling_layer=False).eval()


def texts(sizes: Sizes, n: int) -> list[Passage]:
    """So many; some are half as long as others."""
    draw = random.Random(0)
    lengths = [draw.randint(sizes.words // 2, sizes.words) for _ in range(n)]
    some = [" ".join(f"w{draw.randrange(sizes.different)}" for _ in range(length)) for length in lengths]
    return [Passage(i, str(i), f"w{i} w{i + 1}", text) for i, text in enumerate(some)]


def distance(found: Float32, wanted: Float32) -> float:
    """The largest |a - b| / |b| of a vector."""
    norms = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    return float(norms.max())
