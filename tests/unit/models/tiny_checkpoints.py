"""Checkpoints on disk as transformers writes them, tokenizers included: random, tiny, made without a hub."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    DPRConfig,
    DPRQuestionEncoder,
    EncoderDecoderModel,
    PreTrainedTokenizerFast,
    RagConfig,
    RagTokenForGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT = "who ' s the president of france invented telephone paris is capital in alexander graham bell moon"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!/:-"


def byte_tokenizer() -> Any:
    """One token a byte, as BART's would be without merges: `<s> .. </s>`. Some tokens are half a character."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def word_tokenizer() -> Any:
    """BERT's: lower case, words and pieces of a letter, `[CLS] .. [SEP] .. [SEP]`."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *TEXT.split(), *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )


def bart() -> Any:
    special = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = BartConfig(**sizes, **special, vocab_size=4 + len(BYTES), max_position_embeddings=128)
    return _opinionated(BartForConditionalGeneration(config))


def t5() -> Any:
    config = T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=4 + len(BYTES), decoder_start_token_id=1
    )
    config.pad_token_id, config.eos_token_id = 1, 2
    return _opinionated(T5ForConditionalGeneration(config))


def bert2bert() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": len(word_tokenizer()), "max_position_embeddings": 64, "pad_token_id": 0}
    decoder = BertLMHeadModel(BertConfig(**sizes, is_decoder=True, add_cross_attention=True))
    model = EncoderDecoderModel(encoder=BertModel(BertConfig(**sizes), add_pooling_layer=False), decoder=decoder)
    model.generation_config.update(decoder_start_token_id=2, eos_token_id=3, pad_token_id=0)
    return _opinionated(model)


def rag(kind: Any = RagTokenForGeneration) -> Any:
    """A whole RAG model: DPR's question encoder and BART."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    question_encoder = DPRQuestionEncoder(DPRConfig(**sizes, vocab_size=len(word_tokenizer()), pad_token_id=0))
    generator = bart()
    config = RagConfig.from_question_encoder_generator_configs(
        question_encoder.config, generator.config, max_combined_length=100
    )
    return kind(config=config, question_encoder=question_encoder, generator=generator).eval()


def save(folder: Path, model: Any, tokenizer: Any, **declaration: Any) -> str:
    """A checkpoint of one model and one tokenizer, and what openbook.json says of it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if declaration:
        (folder / "openbook.json").write_text(json.dumps(declaration))
    return str(folder)


def save_rag(folder: Path, model: Any, **declaration: Any) -> str:
    """The layout of facebook/rag-sequence-nq: one set of weights, each tokenizer in a folder of its own."""
    save(folder, model, word_tokenizer(), **declaration)
    for tokenizer_file in folder.glob("*tokenizer*"):
        tokenizer_file.unlink()
    word_tokenizer().save_pretrained(folder / "question_encoder_tokenizer")
    byte_tokenizer().save_pretrained(folder / "generator_tokenizer")
    return str(folder)


def save_rag_of_2020(folder: Path, model: Any) -> str:
    """As the published ones lie: a pickle of weights, vocabularies, and nothing that says whose tokenizers they are."""
    save_rag(folder, model)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    words, letters = word_tokenizer().get_vocab(), byte_tokenizer().get_vocab()
    files = {
        "question_encoder_tokenizer": {
            "vocab.txt": "".join(f"{word}\n" for word in sorted(words, key=words.__getitem__)),
            "tokenizer_config.json": json.dumps({"do_lower_case": True, "model_max_length": 512}),
        },
        "generator_tokenizer": {
            "vocab.json": json.dumps(letters | {"<mask>": len(letters)}),
            "merges.txt": "#version: 0.2\n",
            "tokenizer_config.json": json.dumps({"model_max_length": 1024}),
        },
    }
    for name, contents in files.items():
        (folder / name / "tokenizer.json").unlink()
        for filename, content in contents.items():
            (folder / name / filename).write_text(content)
    return str(folder)


def _opinionated(model: Any) -> Any:
    """Large weights: the next token then depends on the context instead of being the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.0 if "embed" in name or "shared" in name else 0.35, generator=generator)
    return model.eval()
