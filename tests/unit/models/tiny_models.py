"""Random encoder-decoders, small enough for hundreds of searches, opinionated enough that contexts matter."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    DPRConfig,
    DPRQuestionEncoder,
    EncoderDecoderModel,
    FSMTConfig,
    FSMTForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    ProphetNetConfig,
    ProphetNetForConditionalGeneration,
    RagConfig,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

torch.set_num_threads(1)

BOS, PAD, EOS, VOCABULARY = 0, 1, 2, 50
SPECIAL = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS, "vocab_size": VOCABULARY}
SIZES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
SIZES |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}


def bart(seed: int = 0) -> Any:
    return _build(seed, lambda: BartForConditionalGeneration(BartConfig(**SIZES, **SPECIAL, forced_eos_token_id=None)))


def mbart(seed: int = 0) -> Any:
    return _build(
        seed, lambda: MBartForConditionalGeneration(MBartConfig(**SIZES, **SPECIAL, forced_eos_token_id=None))
    )


def pegasus(seed: int = 0) -> Any:
    config = PegasusConfig(**SIZES, **SPECIAL, forced_eos_token_id=None)
    return _build(seed, lambda: PegasusForConditionalGeneration(config))


def t5(seed: int = 0) -> Any:
    config = T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **SPECIAL)
    return _build(seed, lambda: T5ForConditionalGeneration(config))


def switch(seed: int = 0) -> Any:
    config = SwitchTransformersConfig(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, num_experts=2, **SPECIAL)
    return _build(seed, lambda: SwitchTransformersForConditionalGeneration(config))


def nllb_moe(seed: int = 0) -> Any:
    config = NllbMoeConfig(**SIZES, **SPECIAL, num_experts=2, encoder_sparse_step=2, decoder_sparse_step=2)
    return _build(seed, lambda: NllbMoeForConditionalGeneration(config))


def prophetnet(seed: int = 0) -> Any:
    """In float32, for its masks know no other."""
    sizes = {"hidden_size": 16, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 2}
    sizes |= {"num_decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    special = SPECIAL | {"bos_token_id": PAD, "pad_token_id": BOS}  # its positions count from behind 0
    config = ProphetNetConfig(**sizes, **special, max_position_embeddings=64)
    return _build(seed, lambda: ProphetNetForConditionalGeneration(config)).float()


def fsmt(seed: int = 0) -> Any:
    """In float32, as ProphetNet. With a cache, which it makes unless it is told not to, it masks nothing."""
    special = {name: value for name, value in SPECIAL.items() if name != "vocab_size"}
    special |= {"langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}
    config = FSMTConfig(**SIZES, **special, use_cache=False)
    return _build(seed, lambda: FSMTForConditionalGeneration(config)).float()


def bert2bert(seed: int = 0, encoder: Any = BertModel) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    decoder = BertConfig(**sizes, **SPECIAL, max_position_embeddings=64, is_decoder=True, add_cross_attention=True)
    encoding = encoder.config_class(**sizes, **SPECIAL, max_position_embeddings=64)

    def build() -> Any:
        return EncoderDecoderModel(encoder=encoder(encoding, add_pooling_layer=False), decoder=BertLMHeadModel(decoder))

    return _build(seed, build)


def rag(kind: Any, generator: Any, k: int) -> Any:
    """transformers' RAG around a generator, for k passages."""
    small = DPRConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=8)
    config = RagConfig.from_question_encoder_generator_configs(small, generator.config, n_docs=k)
    return kind(config=config, question_encoder=DPRQuestionEncoder(small), generator=generator).double().eval()


def _build(seed: int, build: Any) -> Any:
    torch.manual_seed(seed)
    model = build().double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.0 if "embed" in name or "shared" in name else 0.35)
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = EOS
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
    for config in (model.config, model.generation_config):
        config.forced_bos_token_id = config.forced_eos_token_id = None
    model.config.bos_token_id = None
    model.config.pad_token_id, model.config.eos_token_id = PAD, EOS
    if hasattr(model, "final_logits_bias"):  # no padding inside an answer, and answers of all lengths
        model.final_logits_bias[0, PAD], model.final_logits_bias[0, EOS] = -1e4, 2.0
    return model


def contexts(seed: int, rows: int, length: int = 12) -> tuple[Tensor, Tensor]:
    """Random contexts of 1 to `length` real tokens, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (rows, length), generator=generator)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length) < lengths
    return ids.masked_fill(~mask, PAD), mask.long()


def scores(seed: int, n: int, k: int) -> Tensor:
    return 2 * torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
