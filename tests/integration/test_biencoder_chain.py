"""From an untrained encoder to an index of its own: train, resume, build anew, serve, search, publish."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_encoders
import torch
import transformers
from safetensors.torch import load_file
from tiny_training import jsonl
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import EncoderSettings, IndexClientSettings, IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.space import Space
from openbook.core.types import RetrievalSettings
from openbook.errors import InvalidConfig, SnapshotMismatch
from openbook.index.client.publish import publish
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk.root import Root
from openbook.index.server.server import IndexServer
from openbook.models.encoder import TextEncoder, load_encoder
from openbook.training.opening import open_retriever
from openbook.training.run import train
from openbook.training.settings import RetrieverSettings, TrainingSettings

pytestmark = pytest.mark.usefixtures("undrawn")
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
NAMES = ["bell", "curie", "warsaw", "moon", "earth", "nile", "river", "telephone"]
N_STEPS = 40
WIDE = {
    **tiny_encoders.SIZES,
    "vocab_size": len(tiny_encoders.BERT),
    "max_position_embeddings": 40,
    "initializer_range": 0.2,  # with smaller weights texts are so alike that it takes hundreds of steps
}


class Corpus:
    """Eight passages, and as many questions that share no word with their own: only training can tell."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder = folder
        tokenizer = tiny_encoders.bert_tokenizer()
        torch.manual_seed(0)
        models = [transformers.BertModel(transformers.BertConfig(**WIDE))]
        if family == "dpr":
            config = transformers.DPRConfig(**WIDE)
            models = [transformers.DPRQuestionEncoder(config), transformers.DPRContextEncoder(config)]
        towers = [tiny_encoders.saved(folder / f"tower{i}", model, tokenizer) for i, model in enumerate(models)]
        self.query, self.passage = towers[0], towers[-1]
        self.towers = len(towers)
        rows = [{"id": name, "title": "title", "text": f"passage of {name}"} for name in NAMES]
        self.documents = jsonl(folder / "documents.jsonl", *rows)
        self.more_documents = jsonl(folder / "more.jsonl", *rows, {"id": "more", "title": "", "text": "a long text"})
        self.questions = [f"passage {number}" for number in NUMBERS]
        asked = zip(self.questions, NAMES, rows, strict=True)
        lines = [{"question": q, "answers": [a], "title": "title", "context": row["text"]} for q, a, row in asked]
        jsonl(folder / "questions.jsonl", *lines)
        self.old = self.build(self.documents, "old/snapshot", self.passage)

    def build(self, documents: Path, name: str, encoder: Path | str) -> Path:
        """A snapshot, as a person would build it."""
        arguments = ["build", documents, "--out", self.folder / name, "--encoder", encoder, "--shards", 2]
        result = CliRunner().invoke(app, [*map(str, arguments), "--threads", "1"])
        assert result.exit_code == 0, result.output
        return self.folder / name

    def settings(self, out: str, dropout: bool = False, **loop: Any) -> TrainingSettings:
        file = {"path": self.folder / "questions.jsonl"}
        return TrainingSettings.model_validate(
            {
                "task": {"train": [file], "validation": [file]},
                "retrieval": {"kind": "bm25", "snapshot": self.old, "k": 8},
                "models": {"query_encoder": self.query, "dropout": dropout},
                "biencoder": {"passage_encoder": self.passage if self.towers == 2 else None, "n_negatives": 1},
                "optimizer": {"learning_rate": 1e-2},
                "loop": {"out": self.folder / out, "n_steps": N_STEPS, "batch_size": 8, "micro_batch_size": 8}
                | {"checkpoint_every": N_STEPS, "validate_every": N_STEPS, **loop},
            }
        )


@pytest.fixture(scope="module", params=["dpr", "sentence"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def trained(corpus: Corpus) -> Path:
    """The folder of the trained models."""
    return train(corpus.settings("whole"))


@contextmanager
def tier(root: Path, snapshot: Path) -> Iterator[IndexClientSettings]:
    """Index servers of a root, which is made if it is none."""
    if not Root.is_one(root):
        Root.create(root, snapshot)
    with (
        IndexServer(IndexServerSettings(snapshot=root, shard=0)) as one,
        IndexServer(IndexServerSettings(snapshot=root, shard=1)) as two,
    ):
        yield IndexClientSettings(addresses=(one.address, two.address), timeout_s=60)


def recall_at_1(corpus: Corpus, encoder: str | Path, index: IndexClientSettings) -> float:
    """Of the questions, over the wire."""
    model = TextEncoder.load(EncoderSettings(model=str(encoder)))

    async def scenario() -> float:
        tier = ShardedIndex.of(index)
        try:
            await tier.connect()
            assert tier.encoder_fingerprint == model.space or encoder == corpus.query
            hits = await tier.search(
                model.encode_questions(corpus.questions), RetrievalSettings(k=1), Context(Deadline.after(60))
            )
        finally:
            await tier.close()
        return float(np.mean(hits.ids[:, 0] == np.arange(len(NAMES))))  # passages stand in the documents' order

    return asyncio.run(scenario())


def test_the_trained_encoders_find_in_their_own_index_what_the_untrained_ones_did_not(
    corpus: Corpus, trained: Path
) -> None:
    with tier(corpus.folder / "old", corpus.old) as servers:
        before = recall_at_1(corpus, corpus.query, servers)
        new = corpus.build(corpus.documents, "new/snapshot", trained / "passage_encoder")
        with pytest.raises(SnapshotMismatch, match="encoder fingerprint"):  # old queries would find, and wrongly
            asyncio.run(publish(new, servers))
        assert recall_at_1(corpus, corpus.query, servers) == before
    with tier(corpus.folder / "new", new) as servers:
        after = recall_at_1(corpus, trained / "query_encoder", servers)
        assert after >= 0.75 > 0.5 > before
        # From now on the corpus changes as any other does.
        more = corpus.build(corpus.more_documents, "new/more", trained / "passage_encoder")
        assert asyncio.run(publish(more, servers)) == 2
        assert recall_at_1(corpus, trained / "query_encoder", servers) > 0.5


def test_the_trained_query_encoder_asks_for_no_other_index(corpus: Corpus, trained: Path) -> None:
    query = load_encoder(str(trained / "query_encoder"))
    passage = load_encoder(str(trained / "passage_encoder"), "passage")
    assert query.space == passage.space == passage.fingerprint != load_encoder(corpus.passage, "passage").fingerprint
    assert (query.fingerprint == passage.fingerprint) == (corpus.towers == 1)
    asked = RetrieverSettings(kind="dense", snapshot=corpus.old)
    with pytest.raises(SnapshotMismatch, match=f"by encoder {query.space}, but snapshot"):
        open_retriever(asked, Space("q", query.space, query.dimension), torch.device("cpu"))


def test_the_curves_show_it(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained.parent / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(N_STEPS + 1))
    assert lines[-1]["loss"] < lines[1]["loss"]
    assert lines[-1]["validation/recall_at_1"] >= 0.75 > 0.5 > lines[0]["validation/recall_at_1"]
    assert (trained.parent / "curves.png").exists()


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(corpus: Corpus) -> None:
    def interrupting(step: int, scalars: Any) -> None:
        if step == 6:  # two steps after a checkpoint
            raise KeyboardInterrupt

    def asked(out: str, **loop: Any) -> TrainingSettings:
        return corpus.settings(
            out, dropout=True, **{"n_steps": 9, "checkpoint_every": 4, "micro_batch_size": 4, **loop}
        )

    uninterrupted = train(asked("uninterrupted"))
    with pytest.raises(KeyboardInterrupt):
        train(asked("interrupted"), interrupting)
    resumed = train(asked("interrupted"))
    for tower in ("query_encoder", "passage_encoder"):
        weights = [load_file(folder / tower / "model.safetensors") for folder in (resumed, uninterrupted)]
        torch.testing.assert_close(*weights, rtol=0, atol=1e-6)
    for other in ({"micro_batch_size": 8}, {"gradient_checkpointing": False}):
        with pytest.raises(InvalidConfig, match="was made with loop"):
            train(asked("interrupted", **other))
