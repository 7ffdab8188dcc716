"""Read on with a GPU, where only torch and transformers are: passages given and passages found, in every step.

    python deploy/default-model/on_gpu.py tokens var/default-model TOKENS   # where openbook is installed
    python deploy/default-model/on_gpu.py train TOKENS OUT SECONDS          # where the GPU is, with PYTHONPATH=services
    python deploy/default-model/on_gpu.py reader OUT READER                 # here again, as interpolate.py takes it

`tokens` begins with the embedded reader, the files of prepare.py and the snapshot of its documents. Each step has
256 questions with the passage that answers them and 64 with the five that the query encoder finds, if one of these has
an answer; both halves of the loss weigh the same. The learning rate falls to nothing by the clock, so that rented time
is used up and no more. On an H200 a step of its forerunner took 0.2 to 0.3 s, the first fifty 0.7;
this script was tried on a CPU alone.
"""

import gzip
import io
import json
import lzma
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertLMHeadModel, BertModel, EncoderDecoderModel

GIVEN = [
    *("squad-paragraphs", "squad-passages", "more-passages", "nq-passages", "paragraphs-again", "qamr-passages"),
    *("entityquestions-train-passages", "entityquestions-train-passages"),
    *("found-passages", "fever-passages", "clozes-passages"),
]
FOUND = ["squad-passages", "nq-passages", "more-passages", "entityquestions-train-passages"]
N_GIVEN, N_FOUND, K = 256, 64, 5
LEARNING_RATE, WARMUP_STEPS = 3e-4, 100
MAX_TOKENS, MAX_ANSWER_TOKENS = 224, 64
START, SEPARATOR = 101, 102  # [CLS], [SEP]
Row = tuple[int, int, list[int], list[float]]  # question, answer, passages, scores


def tokens(data: Path, out: Path) -> None:
    """Write OUT/tokens.npz.xz, each text once, and OUT/reader.pt, what training begins with."""
    from openbook.models.checkpoint import load_generator, of_base

    reader, texts = load_generator("embedded"), (_Numbered(), _Numbered(), _Numbered())
    questions, answers, passages = texts
    rows: list[Row] = []
    for record in _records(data, GIVEN):
        answer = _in_one_of([record["context"]], record["answers"]) or record["answers"][0]
        passage = passages[_read_as(record.get("title"), record["context"])]
        rows.append((questions[record["question"]], answers[answer], [passage], [0.0]))
    n_given = len(rows)
    for record, found, scores in _found(data):
        answer = _in_one_of([passage.text for passage in found], record["answers"])
        if answer is not None:
            ids = [passages[_read_as(passage.title, passage.text)] for passage in found]
            rows.append((questions[record["question"]], answers[answer], ids, scores))
    packed: dict[str, Any] = {}
    for name, numbered, limit in zip("qap", texts, (200, MAX_ANSWER_TOKENS - 1, MAX_TOKENS), strict=True):
        ids = reader.tokenizer(list(numbered), add_special_tokens=False, truncation=True, max_length=limit)["input_ids"]
        packed[name] = np.concatenate([np.asarray(each, np.uint16) for each in ids])
        packed[f"{name}_ends"] = np.cumsum([len(each) for each in ids])
    for name, some in (("given", rows[:n_given]), ("found", rows[n_given:])):
        packed[name] = np.array([[question, answer, *ids] for question, answer, ids, _ in some], np.int32)
        packed[f"{name}_scores"] = np.array([scores for *_, scores in some], np.float32)
    out.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **packed)
    (out / "tokens.npz.xz").write_bytes(lzma.compress(buffer.getvalue(), preset=2))
    model = reader.model
    configs = [part.config.to_diff_dict() for part in (model.encoder, model.decoder)]
    weights = {name: weight.half() for name, weight in model.named_parameters()}  # what is shared stands there once
    torch.save((configs, weights, [name for name in weights if not of_base(name)]), out / "reader.pt")
    print(f"{n_given} questions with a passage given, {len(rows) - n_given} with {K} found; {len(passages)} passages")


def train(data: Path, out: Path, seconds: float) -> None:
    """Write OUT/weights.pt: what was trained, in float16."""
    from openbook.core.types import Formulation
    from openbook.models import marginal
    from openbook.models.seq2seq import Seq2Seq

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    configs, weights, names = torch.load(data / "reader.pt")
    model = _model(*configs, weights).to(device).train().requires_grad_(False)
    trained = {name: model.get_parameter(name).requires_grad_() for name in names}
    reader = Seq2Seq(model, keep_mode=True, adds_gradients=True)
    groups = [
        {"params": [w for w in trained.values() if w.dim() > 1], "weight_decay": 0.01},
        {"params": [w for w in trained.values() if w.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), fused=device.type == "cuda")
    steps = iter(
        torch.utils.data.DataLoader(_Steps(data), batch_size=None, num_workers=6, pin_memory=device.type == "cuda")
    )
    begun, step, losses = monotonic(), 0, np.zeros(2)
    while (left := 1 - (monotonic() - begun) / seconds) > 0:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * left
        for part, (ids, mask, scores, labels) in enumerate(next(steps)):
            with torch.autocast(device.type, torch.bfloat16):
                on_device = [each.to(device, non_blocking=True) for each in (ids, mask, scores, labels)]
                loss = marginal.loss(reader, *on_device, Formulation.SEQUENCE).mean()
            (loss / 2).backward()
            losses[part] += float(loss.detach())
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        step += 1
        if step % 50 == 0:
            print(
                f"step {step}, {left * seconds:.0f} s left, losses {losses[0] / 50:.3f}, {losses[1] / 50:.3f}",
                flush=True,
            )
            losses[:] = 0
    out.mkdir(parents=True, exist_ok=True)
    torch.save({name: weight.detach().half().cpu() for name, weight in trained.items()}, out / "weights.pt")
    print(f"{step} steps")


def reader(trained: Path, out: Path) -> None:
    """Write a reader's folder of what `train` wrote."""
    from openbook.models.checkpoint import load_generator
    from openbook.models.saving import save_generator

    generator = load_generator("embedded")
    generator.model.load_state_dict(torch.load(trained / "weights.pt"), strict=False)
    save_generator(out, generator, torch.float16)


class _Numbered(dict[str, int]):
    """Texts by number, in the order in which they were asked for."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


class _Steps(torch.utils.data.IterableDataset[Any]):
    """Tensors of one step after the other, (ids, mask, scores, labels) given and found; every worker has its own."""

    def __init__(self, data: Path) -> None:
        packed = np.load(io.BytesIO(lzma.decompress((data / "tokens.npz.xz").read_bytes())))
        self._texts = {name: (packed[name], packed[f"{name}_ends"]) for name in "qap"}
        self._parts = [
            (packed[name], packed[f"{name}_scores"], n) for name, n in (("given", N_GIVEN), ("found", N_FOUND))
        ]

    def __iter__(self) -> Iterator[list[tuple[Tensor, ...]]]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng(worker.id if worker else 0)
        orders = [self._orders(rng, len(rows), n) for rows, _, n in self._parts]
        while True:
            yield [
                self._tensors(rows[at], scores[at])
                for (rows, scores, _), at in zip(self._parts, map(next, orders), strict=True)
            ]

    def _orders(self, rng: np.random.Generator, n_rows: int, n: int) -> Iterator[np.ndarray]:
        while True:
            order = rng.permutation(n_rows)
            yield from (order[i : i + n] for i in range(0, n_rows - n + 1, n))

    def _tensors(self, rows: np.ndarray, scores: np.ndarray) -> tuple[Tensor, ...]:
        contexts = [self._context(row[0], passage) for row in rows for passage in row[2:]]
        ids, labels = (
            _padded(contexts, 0, 16),
            _padded([[*self._text("a", row[1]), SEPARATOR] for row in rows], -100, 1),
        )
        return ids, (ids != 0).long(), torch.from_numpy(scores), labels

    def _context(self, question: int, passage: int) -> list[int]:
        asked = [START, *self._text("q", question), SEPARATOR]
        return [*asked, *self._text("p", passage)[: MAX_TOKENS - 1 - len(asked)], SEPARATOR]

    def _text(self, name: str, i: int) -> list[int]:
        ids, ends = self._texts[name]
        return ids[ends[i - 1] if i else 0 : ends[i]].tolist()


def _model(encoder: dict[str, Any], decoder: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """The reader, with one matrix of token embeddings, as `openbook.models.checkpoint.bert2bert` has it."""
    model = EncoderDecoderModel(
        encoder=BertModel(BertConfig(**encoder), add_pooling_layer=False),
        decoder=BertLMHeadModel(BertConfig(**decoder)),
    )
    words = model.encoder.embeddings.word_embeddings.weight
    model.decoder.bert.embeddings.word_embeddings.weight = model.decoder.cls.predictions.decoder.weight = words
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    special = model.generation_config
    special.decoder_start_token_id, special.eos_token_id, special.pad_token_id = START, SEPARATOR, 0
    return model


def _records(data: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            yield from map(json.loads, file)


def _found(data: Path) -> Iterator[tuple[dict[str, Any], list[Any], list[float]]]:
    """Every question that is searched for, with the passages found and their scores."""
    from openbook.models.encoder import embed, load_encoder, question_ids
    from openbook.models.formats import pad
    from openbook.training.retrieval import MemoryIndex

    encoder, index = load_encoder("embedded"), MemoryIndex(data / "snapshot", torch.device("cpu"))
    records = list(_records(data, FOUND))
    for first in range(0, len(records), 512):
        some = records[first : first + 512]
        ids = question_ids(encoder.tokenizer, encoder.pooling, [record["question"] for record in some])
        padded = pad(ids, encoder.tokenizer.pad_token_id, at_most=encoder.pooling.max_tokens)
        with torch.no_grad():
            queries = embed(encoder.model.eval(), encoder.pooling, *padded) * encoder.pooling.query_scale
        found = index.find([], queries.numpy(), K)
        yield from zip(some, found.passages, found.scores.tolist(), strict=True)


def _in_one_of(texts: Sequence[str], answers: Sequence[str]) -> str | None:
    from openbook.core.metrics import has_answer

    return next((answer for answer in answers if any(has_answer(text, [answer]) for text in texts)), None)


def _read_as(title: str | None, text: str) -> str:
    return f"{title} : {text}" if title else text


def _padded(rows: Sequence[Sequence[int]], value: int, multiple: int) -> Tensor:
    length = -(-max(map(len, rows)) // multiple) * multiple
    padded = torch.full((len(rows), length), value)
    for row, tokens_ in zip(padded, rows, strict=True):
        row[: len(tokens_)] = torch.tensor(tokens_)
    return padded


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tokens", data, out]:
            tokens(Path(data), Path(out))
        case ["train", data, out, seconds]:
            train(Path(data), Path(out), float(seconds))
        case ["reader", trained, out]:
            reader(Path(trained), Path(out))
        case _:
            sys.exit(__doc__)
