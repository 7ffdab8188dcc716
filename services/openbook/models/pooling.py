"""How an encoder's output becomes an embedding, and what its files say of it."""

from dataclasses import dataclass
from typing import Any, Literal

from openbook.errors import InvalidModel
from openbook.models.source import PROBE, Source, n_positions

SENTENCE_SCALE = 20.0
"""Cosines alone make a prior that is almost uniform. This is the factor that sentence-transformers trains cosines with
in its softmax over passages, so with it the prior is the distribution the encoder was trained to give."""

MAX_TOKENS = 1 << 20
"""A tokenizer of which nothing is known says 1e30."""

PASSAGE_PROMPTS = ("document", "passage", "corpus")
"""What models call the prompt of passages, in the order in which sentence-transformers looks for it."""

NAMED_AFTER = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""sentence_bert_config.json is what all have by now; older ones have one named after their model."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """From text to embedding: all that is not weights or tokenizer."""

    mode: Literal["mean", "cls", "pooler"]
    normalize: bool
    max_tokens: int  # special tokens included
    titles: Literal["pair", "joined"]  # [CLS] title [SEP] text [SEP], or "title. text" as one text
    query_prefix: str = ""
    passage_prefix: str = ""
    query_scale: float = 1.0  # queries are made this long: the prior is a softmax of inner products


def sentence_pooling(source: Source, model: Any, tokenizer: Any, query_scale: float | None) -> Pooling:
    """As sentence-transformers' files say; without them the mean over tokens, normalised.

    Raises:
        InvalidModel: they ask for something that is not done here, or nothing says how many tokens are read.
    """
    modules = source.json("modules.json") or []
    kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
    unknown = set(kinds) - {"Transformer", "Pooling", "Normalize"}
    if unknown:
        raise InvalidModel(f"model {source.name!r}: modules.json asks for {', '.join(sorted(unknown))}")
    prompts = (source.json("config_sentence_transformers.json") or {}).get("prompts") or {}
    query_prefix = "" + prompts.get("query", "")  # an error here, should it be no text
    passage_prefix = "" + next((prompts[name] for name in PASSAGE_PROMPTS if name in prompts), "")
    mode: Literal["mean", "cls"] = "mean"
    for module in modules:
        if module["type"].endswith(".Pooling"):
            config = source.json(f"{module['path']}/config.json") or {}
            mode = _pooling_mode(source, config)
            if (query_prefix or passage_prefix) and config.get("include_prompt") is False:
                raise InvalidModel(f"model {source.name!r}: include_prompt of pooling must be true, got false")
    files = [f"sentence_{each}_config.json" for each in NAMED_AFTER]
    found = ((each, content) for each in files if (content := source.json(each)) is not None)
    filename, transformer = next(found, (files[0], dict[str, Any]()))
    if transformer.get("do_lower_case") and tokenizer(PROBE)["input_ids"] != tokenizer(PROBE.lower())["input_ids"]:
        raise InvalidModel(f"model {source.name!r}: {filename} asks for do_lower_case, its tokenizer knows capitals")
    limits = (transformer.get("max_seq_length"), tokenizer.model_max_length, n_positions(model))
    max_tokens = min(int(limit) for limit in limits if limit)
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise InvalidModel(
            f"model {source.name!r}: max_seq_length of {filename} must say how many tokens it reads, "
            f"1..{MAX_TOKENS}, got {max_tokens}"
        )
    normalize = "Normalize" in kinds or not modules
    return Pooling(
        mode,
        normalize,
        max_tokens,
        titles="joined",
        query_prefix=query_prefix,
        passage_prefix=passage_prefix,
        query_scale=query_scale or (SENTENCE_SCALE if normalize else 1.0),
    )


def _pooling_mode(source: Source, config: dict[str, Any]) -> Literal["mean", "cls"]:
    modes = [
        name.removeprefix("pooling_mode_")
        for name, on in config.items()
        if name.startswith("pooling_mode_") and on is True
    ]
    modes = modes or [config.get("pooling_mode", "mean")]
    if modes in (["mean_tokens"], ["mean"]):
        return "mean"
    if modes in (["cls_token"], ["cls"]):
        return "cls"
    raise InvalidModel(f"model {source.name!r}: pooling must be mean or cls, got {', '.join(modes)}")
