"""Encoders in folders as they are published: random weights, and a tokenizer that knows some forty words."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

TEXT = """the a of was is in who where when invented telephone bell alexander graham marie curie born warsaw moon earth
river nile title text question passage long short one two three four five six seven eight / // : . , ' s ?"""
WORDS = TEXT.split()
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DPR = transformers.DPRConfig(**SIZES, vocab_size=len(BERT), max_position_embeddings=40)


def bert_tokenizer(words: Sequence[str] = BERT) -> Any:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def bert_model(**sizes: int) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | sizes
    return transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=len(BERT), max_position_embeddings=40))


def dpr_model(kind: Any) -> Any:
    torch.manual_seed(1)
    return kind(DPR)


def saved(folder: Path, model: Any, tokenizer: Any, **files: Any) -> str:
    """The folder's name; of `files`, `a__b={...}` becomes a/b.json."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return str(folder)
