"""Read on where only torch and transformers are, and learn to be unsure of passages without an answer.

    python deploy/default-model/apart.py tokens READER var/default-model TOKENS   # where openbook is installed
    torchrun --nproc-per-node 2 deploy/default-model/apart.py train TOKENS OUT SECONDS
    python deploy/default-model/apart.py reader OUT READER                 # here again, as interpolate.py takes it

`tokens` begins with a reader's folder or `embedded`, the files of prepare.py and the snapshot of its documents. The
query encoder finds five passages for each question. A step reads one that has the answer, for the usual loss, and two
that have none of the question's answers. Of these the loss is -log(1 - p) of the likeliest other token at each of the
answer's, those before it being the right ones: RAG-Sequence's own loss does not see how sure the reader is of something
else there, and that is what wins over the right answer; RAG-Token asks these passages for every token. Processes, one
for a core or a GPU, share a step. The learning rate falls to nothing by the clock.
"""

import gzip
import io
import json
import lzma
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from transformers import BertConfig, BertLMHeadModel, BertModel, EncoderDecoderModel

SHARES = {"entityquestions-train-passages": 20, "squad-passages": 8, "nq-passages": 4, "more-passages": 0}
"""Questions of a step. None of the last: they are few, and counted with those before them."""
K, N_WITHOUT = 5, 2
UNSURE = 0.7
"""What passages without an answer weigh."""
LEARNING_RATE, WARMUP_STEPS = 1e-4, 40
ROWS_AT_ONCE = 16
"""Passages that a core reads together; a GPU all of a step."""
MAX_TOKENS, MAX_QUESTION_TOKENS, MAX_ANSWER_TOKENS = 224, 200, 64
START, SEPARATOR, NO_LABEL = 101, 102, -100  # [CLS], [SEP]


def tokens(reader_: str, data: Path, out: Path) -> None:
    """Write OUT/tokens.npz.xz, each text once, and OUT/reader.pt, what training begins with."""
    from openbook.core.metrics import has_answer
    from openbook.models.checkpoint import load_generator, of_base

    reader, texts = load_generator(reader_), (_Numbered(), _Numbered(), _Numbered())
    questions, answers, passages = texts
    rows: dict[str, list[list[int]]] = {name: [] for name in SHARES}
    for name, record, found in _found(data):
        answer = next((a for a in record["answers"] if any(has_answer(p.text, [a]) for p in found)), None)
        if answer is not None:
            ids = [passages[f"{p.title} : {p.text}" if p.title else p.text] for p in found]
            has_it = [has_answer(p.text, [answer]) for p in found]
            has_none = [not has_answer(f"{p.title} . {p.text}", record["answers"]) for p in found]
            rows[name].append([questions[record["question"]], answers[answer], *ids, *has_it, *has_none])
    packed: dict[str, Any] = {f"rows {name}": np.array(some, np.int32) for name, some in rows.items()}
    limits = (MAX_QUESTION_TOKENS, MAX_ANSWER_TOKENS - 1, MAX_TOKENS)
    for name, numbered, limit in zip("qap", texts, limits, strict=True):
        ids = reader.tokenizer(list(numbered), add_special_tokens=False, truncation=True, max_length=limit)["input_ids"]
        packed[name] = np.concatenate([np.asarray(each, np.uint16) for each in ids])
        packed[f"{name}_ends"] = np.cumsum([len(each) for each in ids])
    out.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **packed)
    (out / "tokens.npz.xz").write_bytes(lzma.compress(buffer.getvalue(), preset=2))
    model = reader.model
    configs = [part.config.to_diff_dict() for part in (model.encoder, model.decoder)]
    weights = {name: weight.half() for name, weight in model.named_parameters()}  # what is shared stands there once
    torch.save((configs, weights, [name for name in weights if not of_base(name)]), out / "reader.pt")
    print(f"{sum(map(len, rows.values()))} questions, {len(passages)} passages")


def train(data: Path, out: Path, seconds: float) -> None:
    """Write OUT/weights.pt: what was trained, in float16."""
    rank, n_processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if n_processes > 1:
        distributed.init_process_group("gloo")
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    configs, weights, names = torch.load(data / "reader.pt")
    model = _model(*configs, weights).to(device).eval().requires_grad_(False)  # dropout costs a CPU a third of the time
    trained = {name: model.get_parameter(name).requires_grad_() for name in names}
    groups = [
        {"params": [w for w in trained.values() if w.dim() > 1], "weight_decay": 0.01},
        {"params": [w for w in trained.values() if w.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), foreach=True)
    steps = _steps(data, np.random.default_rng(0))
    at_once = ROWS_AT_ONCE if device.type == "cpu" else sys.maxsize
    begun, step, sums = monotonic(), 0, np.zeros(2)
    while (left := _of_first(1 - (monotonic() - begun) / seconds)) > 0:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP_STEPS) * left
        rows = next(steps)
        n_with_it = sum(has_it for _, _, has_it in rows)
        n = [n_with_it, len(rows) - n_with_it]
        mine = rows[rank::n_processes]
        for first in range(0, len(mine), at_once):
            losses = _losses(model, mine[first : first + at_once], device)
            (losses[0] / n[0] + UNSURE * losses[1] / n[1]).backward()
            sums += [float(loss) / of * n_processes for loss, of in zip(losses.detach(), n, strict=True)]
        if n_processes > 1:
            _add_up([weight.grad for weight in trained.values()])
        nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        step += 1
        if step % 20 == 0:
            if rank == 0:
                with_it, without = sums / 20
                print(f"step {step}, {left * seconds:.0f} s left, losses {with_it:.3f}, {without:.3f}", flush=True)
            sums[:] = 0
    if rank == 0:
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


Row = tuple[list[int], list[int], bool]
"""What the encoder reads, the answer, and whether it stands there."""


def _steps(data: Path, rng: np.random.Generator) -> Iterator[list[Row]]:
    """The rows of one step after the other, the longest first, every question once before any comes again."""
    packed = np.load(io.BytesIO(lzma.decompress((data / "tokens.npz.xz").read_bytes())))
    texts = {name: (packed[name], packed[f"{name}_ends"]) for name in "qap"}

    def text(name: str, i: int) -> list[int]:
        ids, ends = texts[name]
        return ids[ends[i - 1] if i else 0 : ends[i]].tolist()

    def forever(rows: np.ndarray) -> Iterator[np.ndarray]:
        while True:
            yield from rng.permutation(rows)

    def rows_of(question: int, answer: int, passages: np.ndarray, has_it: np.ndarray, none: np.ndarray) -> list[Row]:
        asked = [START, *text("q", question), SEPARATOR]
        with_it, without = np.flatnonzero(has_it), np.flatnonzero(none)
        chosen = [(each, True) for each in rng.choice(with_it, min(1, len(with_it)))]
        chosen += [(each, False) for each in rng.choice(without, min(N_WITHOUT, len(without)), replace=False)]
        label = [*text("a", answer), SEPARATOR]
        return [
            ([*asked, *text("p", passages[each])[: MAX_TOKENS - 1 - len(asked)], SEPARATOR], label, has)
            for each, has in chosen
        ]

    names = list(SHARES)
    kinds = {name: packed[f"rows {name}"] for name in names}
    kinds[names[-2]] = np.concatenate([kinds[names[-2]], kinds.pop(names[-1])])
    streams = [(forever(kinds[name]), SHARES[name]) for name in kinds]
    while True:
        rows: list[Row] = []
        for stream, n in streams:
            for _ in range(n):
                question, answer, *rest = next(stream)
                rows += rows_of(question, answer, *np.split(np.array(rest), [K, 2 * K]))
        yield sorted(rows, key=lambda row: -len(row[0]))


def _losses(model: Any, rows: list[Row], device: torch.device) -> Tensor:
    """(2,): sums of -log p of the answers, and of -log(1 - p) of the likeliest other tokens where they do not stand."""
    ids = _padded([row for row, _, _ in rows], 0, 16).to(device)
    labels = _padded([label for _, label, _ in rows], NO_LABEL, 1).to(device)
    has_it = torch.tensor([has for _, _, has in rows], device=device)
    mask, right = (ids != 0).long(), labels.clamp_min(0)
    before = torch.cat([torch.full_like(right[:, :1], START), right[:, :-1]], 1)
    with torch.autocast(device.type, torch.bfloat16):
        read = model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        logits = model.decoder(before, encoder_hidden_states=read, encoder_attention_mask=mask).logits
    log_p = logits.float().log_softmax(-1)
    of_right = log_p.gather(-1, right[..., None])[..., 0]
    of_other = log_p.scatter(-1, right[..., None], -torch.inf).amax(-1).exp().clamp_max(0.999)
    losses = torch.where(has_it[:, None], -of_right, -torch.log1p(-of_other)) * (labels != NO_LABEL)
    return torch.stack([losses[has_it].sum(), losses[~has_it].sum()])


def _of_first(value: float) -> float:
    """The first process's, for all."""
    if not distributed.is_initialized():
        return value
    shared = torch.tensor([value])
    distributed.broadcast(shared, 0)
    return float(shared)


def _add_up(gradients: list[Any]) -> None:
    """Those of all processes, in place."""
    flat = torch.cat([each.flatten() for each in gradients]).cpu()
    distributed.all_reduce(flat)
    for each, summed in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        each.copy_(summed.view_as(each))


def _model(encoder: dict[str, Any], decoder: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    """The reader, with one matrix of token embeddings, as `openbook.models.checkpoint.bert2bert` has it."""
    model = EncoderDecoderModel(
        encoder=BertModel(BertConfig(**encoder), add_pooling_layer=False),
        decoder=BertLMHeadModel(BertConfig(**decoder)),
    )
    words = model.encoder.embeddings.word_embeddings.weight
    model.decoder.bert.embeddings.word_embeddings.weight = model.decoder.cls.predictions.decoder.weight = words
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=False)
    return model


def _found(data: Path) -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
    """Every question with the file that it is of, and the passages found."""
    from openbook.models.encoder import embed, load_encoder, question_ids
    from openbook.models.formats import pad
    from openbook.training.retrieval import MemoryIndex

    encoder, index = load_encoder("embedded"), MemoryIndex(data / "snapshot", torch.device("cpu"))
    records = []
    for name in SHARES:
        with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            records += [(name, json.loads(line)) for line in file]
    for first in range(0, len(records), 512):
        some = records[first : first + 512]
        ids = question_ids(encoder.tokenizer, encoder.pooling, [record["question"] for _, record in some])
        padded = pad(ids, encoder.tokenizer.pad_token_id, at_most=encoder.pooling.max_tokens)
        with torch.no_grad():
            queries = embed(encoder.model.eval(), encoder.pooling, *padded) * encoder.pooling.query_scale
        found = index.find([], queries.numpy(), K)
        yield from ((name, record, passages) for (name, record), passages in zip(some, found.passages, strict=True))


def _padded(rows: list[list[int]], value: int, multiple: int) -> Tensor:
    length = -(-max(map(len, rows)) // multiple) * multiple
    padded = torch.full((len(rows), length), value)
    for row, tokens_ in zip(padded, rows, strict=True):
        row[: len(tokens_)] = torch.tensor(tokens_)
    return padded


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tokens", reader_, data, out]:
            tokens(reader_, Path(data), Path(out))
        case ["train", data, out, seconds]:
            train(Path(data), Path(out), float(seconds))
        case ["reader", trained, out]:
            reader(Path(trained), Path(out))
        case _:
            sys.exit(__doc__)
