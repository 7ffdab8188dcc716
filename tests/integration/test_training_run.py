"""`openbook train --local` with tiny models, from files to files: interrupted, shared out, refused, saved, loaded."""

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import tiny_encoders
import tiny_training as tiny
import torch
import yaml
from safetensors.torch import load_file
from small_disk import files_of_at_most
from torch import Tensor
from transformers import RagSequenceForGeneration, RagTokenizer
from typer.testing import CliRunner

from openbook.cli import app
from openbook.errors import InvalidConfig, InvalidDocuments, InvalidModel, StartupError
from openbook.files import partial_of
from openbook.index.building.build import build_snapshot
from openbook.models.checkpoint import load_generator, of_base
from openbook.models.encoder import load_encoder
from openbook.models.source import weights_digest
from openbook.testing import served
from openbook.training import checkpoints
from openbook.training.loop import Loop, TrainingDiverged
from openbook.training.loss import RagLoss
from openbook.training.rag import RagJob
from openbook.training.retrieval import MemoryIndex
from openbook.training.run import Run, train
from openbook.training.settings import TrainingSettings

pytestmark = pytest.mark.usefixtures("undrawn")
N_STEPS = 8


class World:
    """Files of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.encoder, self.generator = tiny.models(folder)
        self.snapshot = tiny.snapshot(folder)
        self.questions = tiny.questions(folder)

    def config(self, out: str, **sections: dict[str, Any]) -> dict[str, Any]:
        given: dict[str, dict[str, Any]] = {
            "task": {"train": [{"path": str(self.questions)}], "validation": [{"path": str(self.questions)}]},
            "retrieval": {"kind": "dense", "k": 3, "snapshot": str(self.snapshot)},
            "models": {"query_encoder": self.encoder, "generator": self.generator},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2},
            "loop": {"out": str(self.folder / out), "n_steps": N_STEPS, "batch_size": 4, "micro_batch_size": 2}
            | {"checkpoint_every": 3, "validate_every": 5, "n_validation": 3},
        }
        return {name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}}

    def settings(self, out: str, **sections: dict[str, Any]) -> TrainingSettings:
        return TrainingSettings.model_validate(self.config(out, **sections))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def whole(files: World) -> Path:
    """The folder of the models of a run that was not interrupted."""
    return train(files.settings("whole"))


def weights(model: Path) -> dict[str, Tensor]:
    return {
        f"{file.parent.relative_to(model)}/{name}": value
        for file in sorted(model.rglob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def check_same(one: Path, other: Path) -> None:
    """To the bit."""
    assert tiny.curve(one.parent) == tiny.curve(other.parent)
    mine, others = weights(one), weights(other)
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)


def test_what_a_run_leaves_behind(files: World, whole: Path) -> None:
    out = files.folder / "whole"
    assert whole == out / "model"
    found = tiny.curve(out)
    assert [line["step"] for line in found] == list(range(N_STEPS + 1))
    assert [line["step"] for line in found if "validation/exact_match" in line] == [0, 5, 8]
    seen = {"loss", "learning_rate", "gradient_norm", "prior_entropy", "distinct_passages"}
    assert all(line.keys() >= seen for line in found[1:])
    assert [line["learning_rate"] for line in found[1:4]] == pytest.approx([1.5e-3, 3e-3, 3e-3])
    assert found[-1]["validation/log_likelihood"] > found[0]["validation/log_likelihood"]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-0000006", "step-0000008"]
    assert {path.name for path in out.iterdir()} >= {"curves.png", "metrics.jsonl", "tensorboard"}


def test_training_changed_both_models_and_nothing_else(files: World, whole: Path) -> None:
    before = {"query": load_encoder(files.encoder), "generator": load_generator(files.generator)}
    after = {"query": load_encoder(str(whole)), "generator": load_generator(str(whole))}
    for name in before:
        assert before[name].fingerprint != after[name].fingerprint
    assert load_encoder(str(whole)).space == tiny.SPACE


@pytest.mark.parametrize(("after", "torn"), [(0, False), (3, False), (7, False), (7, True)])
def test_interrupted_and_run_again_it_ends_with_the_same_bits(
    files: World, whole: Path, after: int, torn: bool
) -> None:
    """Before the first checkpoint, right after one, between, and with the last one torn; with dropout."""

    def interrupting(step: int, scalars: Mapping[str, float]) -> None:
        if step == after:
            raise KeyboardInterrupt

    settings = files.settings(f"after-{after}-{torn}")
    with pytest.raises(KeyboardInterrupt):
        train(settings, interrupting)
    assert not (settings.loop.out / "model").exists()
    begun = [step for step in (3, 6) if step <= after - (after % 3 == 0)]
    if torn:
        last = settings.loop.out / f"checkpoints/step-{begun.pop():07d}/weights.safetensors"
        os.truncate(last, last.stat().st_size // 2)
    steps: list[int] = []
    check_same(train(settings, lambda step, scalars: steps.append(step)), whole)
    assert steps == list(range(begun[-1] if begun else 0, N_STEPS + 1)), "first where it goes on"


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""What shells say of a command that these have ended."""


def test_a_signal_waits_for_the_step_and_its_checkpoint(
    files: World, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing that was computed is computed again."""
    settings = files.settings("held back")
    handlers = {each: signal.getsignal(each) for each in CODES}

    def interrupting(step: int, scalars: Mapping[str, float]) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(settings, interrupting)
    assert caplog.messages == [
        "SIGINT: stopping after this step and its checkpoint; once more stops at once",
        "stopped after step 4: the same command goes on from there",
    ]
    assert {each: signal.getsignal(each) for each in CODES} == handlers
    steps: list[int] = []
    check_same(train(settings, lambda step, scalars: steps.append(step)), whole)
    assert steps == list(range(4, N_STEPS + 1))


def test_a_second_signal_stops_a_run_at_once(files: World) -> None:
    settings = files.settings("twice")

    def interrupting(step: int, scalars: Mapping[str, float]) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(settings, interrupting)
    assert [path.name for path in (settings.loop.out / "checkpoints").iterdir()] == ["step-0000003"]


@pytest.mark.parametrize(("number", "code"), CODES.items())
def test_an_interrupted_command_ends_as_others_do(
    files: World, number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here while a checkpoint is written, which is whole."""
    config, save = files.folder / "interrupted.yaml", checkpoints.save
    loop = {"checkpoint_every": 1, "n_validation": 1}
    config.write_text(yaml.safe_dump(files.config(f"interrupted {number}", loop=loop)))

    def saved(*given: Any) -> None:
        signal.raise_signal(number)
        save(*given)

    monkeypatch.setattr(checkpoints, "save", saved)
    assert CliRunner().invoke(app, ["train", str(config), "--local"]).exit_code == code
    assert [path.name for path in (files.folder / f"interrupted {number}/checkpoints").iterdir()] == ["step-0000001"]


def test_a_signal_that_is_ignored_stays_so(files: World) -> None:
    """SIGHUP under `nohup`."""

    def interrupting(step: int, scalars: Mapping[str, float]) -> None:
        signal.raise_signal(signal.SIGHUP)

    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(files.settings("ignored", loop={"n_steps": 2, "n_validation": 1}), interrupting).exists()
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_finished_run_is_only_saved_again(files: World, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with other settings that change no result."""
    n_threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", n_threads.append)
    others = {"n_threads": 2, "checkpoint_every": 4, "n_checkpoints": 1, "validate_every": 3, "n_validation": 2}
    settings = files.settings("finished", loop=others)
    shutil.copytree(whole.parent, settings.loop.out)
    (settings.loop.out / "model/model.safetensors").unlink()  # killed while saving
    steps: list[int] = []
    check_same(train(settings, lambda step, scalars: steps.append(step)), whole)
    assert steps == [N_STEPS]
    assert n_threads == [2]


def test_what_was_put_beside_a_finished_model_stays(files: World, whole: Path) -> None:
    """`confidence.json` is: `openbook calibrate` fitted it to this very model."""
    settings = files.settings("calibrated")
    shutil.copytree(whole.parent, settings.loop.out)
    (settings.loop.out / "model/confidence.json").write_text("precious")
    model = train(settings)
    assert (model / "confidence.json").read_text() == "precious"
    check_same(model, whole)
    assert not partial_of(model).exists()


def test_another_model_is_there_until_the_trained_one_takes_its_place(
    files: World, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the process is killed while it saves."""
    settings, save = files.settings("former"), RagJob.save
    shutil.copytree(whole.parent, settings.loop.out)
    weights_file = settings.loop.out / "model/model.safetensors"
    weights_file.write_bytes(b"former")

    def killed(self: RagJob, folder: Path) -> None:
        save(self, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RagJob, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            train(settings)
    assert weights_file.read_bytes() == b"former"
    check_same(train(settings), whole)


@pytest.mark.parametrize("written", ["checkpoint", "model"])
def test_a_run_that_fills_the_disk_says_so_and_goes_on_with_more_room(files: World, whole: Path, written: str) -> None:
    """An error of ours, which Ray Train does not try again."""
    settings = files.settings(f"no room for a {written}")
    shutil.copytree(whole.parent, settings.loop.out, ignore=shutil.ignore_patterns("model", f"{written}s"))
    message = rf"^{settings.loop.out}: cannot go on: File too large; with more room the same command does$"
    with files_of_at_most(30_000), pytest.raises(StartupError, match=message):
        train(settings)
    assert not list(settings.loop.out.rglob("*.partial"))
    check_same(train(settings), whole)


def test_two_workers_with_half_the_batch_each(files: World) -> None:
    """The paper's arithmetic does not know how many there are: to 1e-6 in float32 after 5 steps."""
    asked = {"loop": {"n_steps": 5, "batch_size": 8}, "workers": {"n_workers": 2}, "optimizer": {"learning_rate": 1e-3}}
    alone = train(files.settings("one", **{**asked, "workers": {"n_workers": 1}}))
    together = tiny.Together(2)

    def work(world: Any) -> None:
        run = Run(files.settings("two", **asked), world)
        run.train()
        run.close()

    together.run(work)
    mine, others = weights(alone), weights(files.folder / "two/model")
    for name, value in mine.items():
        torch.testing.assert_close(others[name], value, atol=1e-6, rtol=0)
    for one, other in zip(tiny.curve(files.folder / "one"), tiny.curve(files.folder / "two"), strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)


def test_over_index_servers_it_is_the_same_run(files: World, whole: Path) -> None:
    with served(files.snapshot) as servers:
        addresses = [server.address for server in servers]
        retrieval = {"snapshot": None, "index": {"addresses": addresses, "timeout_s": 60}}
        check_same(train(files.settings("served", retrieval=retrieval)), whole)


def test_transformers_loads_what_was_trained_and_has_the_same_loss(files: World, whole: Path) -> None:
    """DPR and BART: RAG's own layout."""
    rag = RagSequenceForGeneration.from_pretrained(whole)
    tokenizer = RagTokenizer.from_pretrained(whole)
    settings = files.settings("unused", models={"dropout": False})
    memory = MemoryIndex(files.snapshot, torch.device("cpu"))
    objective = RagLoss(load_encoder(str(whole)), load_generator(str(whole)), memory, settings)
    example = tiny.examples(1)[0]
    collated = objective.collate([example])
    asked = tokenizer.question_encoder(example.text, return_tensors="pt")
    queries = rag.question_encoder(**{name: asked[name] for name in ("input_ids", "attention_mask")}).pooler_output
    assert collated.vectors is not None
    answer = tokenizer.generator(example.target, add_special_tokens=False)["input_ids"]
    loss = rag(
        context_input_ids=collated.context_ids,
        context_attention_mask=collated.context_mask,
        doc_scores=(queries[:, None] * collated.vectors).sum(-1),
        labels=torch.tensor([[2, *answer, 2]]),
        n_docs=3,
    ).loss
    torch.testing.assert_close(objective(collated).total, loss[0], atol=1e-4, rtol=1e-5)


def test_a_sentence_encoder_is_saved_by_itself_and_keeps_its_pooling(files: World) -> None:
    cls = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{k}", "path": "1_Pooling" if k == "Pooling" else ""} for k in kinds
    ]
    name = tiny_encoders.saved(
        files.folder / "sentence",
        tiny_encoders.bert_model(),
        tiny_encoders.bert_tokenizer(),
        modules=modules,
        **{"1_Pooling__config": cls},
        config_sentence_transformers={"prompts": {"query": "question : "}},
        openbook={"query_scale": 7.0},
    )
    before, snapshot = load_encoder(name), files.folder / "its own"
    build_snapshot(tiny.passages(9), tiny.vectors(9), snapshot, 1, "Flat", "tiny", before.fingerprint)
    retrieval = {"snapshot": str(snapshot)}
    model = train(files.settings("sentences", models={"query_encoder": name}, retrieval=retrieval, loop={"n_steps": 2}))
    after = load_encoder(str(model / "query_encoder"))
    assert after.pooling == before.pooling
    assert after.space == before.fingerprint != after.fingerprint, "whose passages it was trained to find"
    assert weights_digest(after.model) != weights_digest(before.model)
    generator = load_generator(str(model / "generator"))
    assert generator.input_format == load_generator(files.generator).input_format
    models = {"query_encoder": name, "train_query_encoder": False}
    frozen = train(files.settings("frozen", models=models, retrieval=retrieval, loop={"n_steps": 2}))
    assert [path.name for path in frozen.iterdir()] == ["generator"], "the query encoder is as it was"


def test_the_embedded_reader_is_saved_beside_its_encoder(files: World) -> None:
    """In float16 and without the embeddings it shares: as small as the one that comes with openbook."""
    given = {"train": [{"path": str(files.questions)}], "validation": []}
    sections = {"task": given, "retrieval": {"kind": "none"}, "loop": {"n_steps": 1}}
    models = {"query_encoder": "embedded", "generator": "embedded", "saved_dtype": "float16"}
    run = Run(files.settings("embedded", models=models, **sections))
    model = run.train()
    run.close()
    assert not any(map(of_base, run.loop.parameters)), "what is trained of them would not be saved"
    assert [path.name for path in model.iterdir()] == ["generator"]
    before, after = load_generator("embedded"), load_generator(str(model / "generator"))
    assert after.base == "embedded"
    assert after.input_format == before.input_format
    assert after.fingerprint != before.fingerprint
    stored = weights(model / "generator")
    assert {value.dtype for value in stored.values()} == {torch.float16}
    assert not any("embeddings" in name for name in stored)


def regexes(files: World) -> dict[str, Any]:
    rows = [{"question": text, "answer_regex": f"{text.split()[0]}|zzz"} for text in tiny.texts(8, 3, seed=2)]
    return {"train": [{"path": str(tiny.jsonl(files.folder / "regexes.jsonl", *rows))}], "validation": []}


def claims(files: World) -> dict[str, Any]:
    rows = [{"claim": text, "label": "NOT"[i % 3]} for i, text in enumerate(tiny.texts(9, 3))]
    path = str(tiny.jsonl(files.folder / "claims.jsonl", *rows))
    labels = {"N": "no", "T": "yes"}  # two of the three
    return {"kind": "classification", "labels": labels, "train": [{"path": path}], "validation": [{"path": path}]}


VARIANTS: dict[str, Callable[[World], dict[str, dict[str, Any]]]] = {
    "token": lambda files: {"models": {"formulation": "token"}},
    "frozen retriever": lambda files: {"models": {"train_query_encoder": False}},
    "query encoder alone": lambda files: {"models": {"train_generator": False}, "optimizer": {"learning_rate": 0.02}},
    "bm25": lambda files: {"retrieval": {"kind": "bm25"}},
    "nothing retrieved": lambda files: {"retrieval": {"kind": "none"}},
    "k above the corpus": lambda files: {"retrieval": {"k": 20}, "loop": {"n_steps": 6}},
    "question generation": lambda files: {"task": {"kind": "question_generation"}},
    "regular expressions": lambda files: {"task": regexes(files)},
    "classification": lambda files: {"task": claims(files)},
    "bfloat16": lambda files: {"loop": {"dtype": "bfloat16"}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_tasks_and_ablations_learn(files: World, name: str) -> None:
    """The loss of the same few examples falls."""
    sections = VARIANTS[name](files)
    sections["models"] = {"dropout": False, **sections.get("models", {})}
    sections["loop"] = {"n_steps": 10, "micro_batch_size": 4, "validate_every": 100, **sections.get("loop", {})}
    train(files.settings(name, **sections))
    losses = [line["loss"] for line in tiny.curve(files.folder / name)[-sections["loop"]["n_steps"] :]]
    assert sum(losses[-2:]) < sum(losses[:2])  # two steps see all eight of them: parts of them differ by a third


@pytest.mark.parametrize(
    ("sections", "difference"),
    [
        ({"retrieval": {"k": 4}}, "retrieval = 'dense, k = 3', this run has 'dense, k = 4'"),
        ({"optimizer": {"learning_rate": 1e-3}}, "optimizer.learning_rate = 0.003, this run has 0.001"),
        ({"loop": {"seed": 1}}, "loop.seed = 0, this run has 1"),
        (
            {"loop": {"n_steps": 9, "batch_size": 8}, "retrieval": {"k": 2}},
            "loop.batch_size = 4, this run has 8; loop.n_steps = 8, this run has 9; "
            "retrieval = 'dense, k = 3', this run has 'dense, k = 2'",
        ),
        ({"loop": {"dtype": "bfloat16"}}, "loop.dtype = 'float32', this run has 'bfloat16'"),
        ({"models": {"dropout": False}}, "models.dropout = True, this run has False"),
    ],
)
def test_a_run_goes_on_only_as_it_began(files: World, whole: Path, sections: dict[str, Any], difference: str) -> None:
    """All that differs is named, and nothing else."""
    with pytest.raises(InvalidConfig, match=rf"step-0000008: was made with {difference}; give it a folder of its own$"):
        train(files.settings("whole", **sections))


@pytest.mark.parametrize("former", [None, "null", "false"])
def test_a_run_that_has_too_little_memory_goes_on_with_gradient_checkpointing(
    files: World, whole: Path, former: str | None
) -> None:
    """It changes no result of RAG's. Former versions wrote it into the plan."""
    settings = files.settings(f"less memory, {former}", loop={"gradient_checkpointing": True})
    shutil.copytree(whole.parent, settings.loop.out, ignore=shutil.ignore_patterns("model", "step-0000008"))
    state = settings.loop.out / "checkpoints/step-0000006/state.json"
    if former is not None:
        written = json.loads(state.read_text())
        loop = written["plan"]["loop"]
        written["plan"]["loop"] = loop.replace(',"seed"', f',"gradient_checkpointing":{former},"seed"')
        state.write_text(json.dumps(written))
    check_same(train(settings), whole)


def test_a_run_goes_on_only_with_what_it_began_with(files: World, whole: Path) -> None:
    build_snapshot(tiny.passages(9), -tiny.vectors(9), files.folder / "other", 1, "Flat", "tiny", tiny.SPACE)
    more = tiny.jsonl(files.folder / "more.jsonl", {"question": "who", "answers": ["bell"]})
    cases: list[tuple[str, dict[str, Any]]] = [
        ("snapshot", {"retrieval": {"snapshot": str(files.folder / "other")}}),
        ("examples", {"task": {"train": [{"path": str(files.questions)}, {"path": str(more)}]}}),
        ("query encoder", {"models": {"query_encoder": str(whole)}}),
        ("generator", {"models": {"generator": str(whole)}}),
    ]
    for name, sections in cases:
        with pytest.raises(InvalidConfig, match=f"was made with {name} = "):
            train(files.settings("whole", **sections))


def test_examples_that_are_too_long_are_left_out_and_counted(files: World, caplog: pytest.LogCaptureFixture) -> None:
    """At the start, not in the middle of the run: in training and in validation."""
    long = {"id": "long", "question": "who " * 40, "answers": ["bell"]}
    wordy = {"id": "wordy", "question": "who", "answers": ["bell " * 20]}
    path = str(tiny.jsonl(files.folder / "long.jsonl", long, wordy, {"question": "who", "answers": ["bell"]}))
    task = {"train": [{"path": path}], "validation": [{"path": path}]}
    with caplog.at_level(logging.WARNING):
        train(files.settings("long", task=task, loop={"n_steps": 2}))
    warnings = [record.message for record in caplog.records if "left out" in record.message]
    assert len(warnings) == 2
    for warning in warnings:
        assert "2 of 3 examples are left out, first long: question has 166 tokens" in warning
    none = str(tiny.jsonl(files.folder / "too_long.jsonl", long))
    with pytest.raises(InvalidDocuments, match="all examples are too long"):
        Run(files.settings("none", task={"train": [{"path": none}]}))


def test_what_could_not_be_saved_is_refused_before_it_is_trained(files: World) -> None:
    """An old RAG checkpoint's generator, which reads questions as its own query encoder spells them."""
    old = tiny_checkpoints.save_rag(files.folder / "old", tiny_checkpoints.rag())
    name = tiny_encoders.saved(
        files.folder / "bert",
        tiny_encoders.bert_model(),
        tiny_encoders.bert_tokenizer(),
        openbook={"space": tiny.SPACE},
    )
    with pytest.raises(InvalidModel, match="only RAG's layout holds a generator that reads"):
        Run(files.settings("unsaved", models={"query_encoder": name, "generator": old}))


def test_what_regular_expressions_match_is_looked_for_in_more_passages_than_are_trained_with(files: World) -> None:
    rows = [{"question": "who", "answer_regex": passage.text} for passage in tiny.passages(9)]
    path = str(tiny.jsonl(files.folder / "everywhere.jsonl", *rows))
    task = {"train": [{"path": path}], "validation": []}
    run = Run(files.settings("everywhere", task=task, retrieval={"k": 1}))
    run.close()
    assert [example.target for example in run.job.examples] == [passage.text for passage in tiny.passages(9)]


def test_regular_expressions_need_passages(files: World) -> None:
    with pytest.raises(InvalidConfig, match=r"retrieval.kind must be dense or bm25"):
        Run(files.settings("given", task=regexes(files), retrieval={"kind": "given"}))


def test_given_passages_have_to_be_given(files: World) -> None:
    path = files.folder / "bare.jsonl"
    path.write_text('{"id": "7", "question": "who?", "answers": ["the moon"]}\n')
    bare = {"train": [{"path": str(path)}], "validation": []}
    with pytest.raises(InvalidDocuments, match=r"needs a context for every question: question 7 has none, as 1 of 1"):
        Run(files.settings("bare", task=bare, retrieval={"kind": "given"}))


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_named(files: World, device: str) -> None:
    with pytest.raises(InvalidModel, match=f"device '{device}' cannot be used"):
        Run(files.settings("nowhere", loop={"device": device}))


def test_the_command(files: World, whole: Path) -> None:
    config = files.folder / "config.yaml"
    config.write_text(yaml.safe_dump(files.config("command")))
    done = CliRunner().invoke(app, ["train", str(config), "--local"])
    assert done.exit_code == 0, done.output
    assert f"{files.folder / 'command/model'}: trained for 8 steps" in done.output.replace("\n", "")
    check_same(files.folder / "command/model", whole)
    config.write_text(yaml.safe_dump(files.config("command", loop={"n_stepz": 3})))
    done = CliRunner().invoke(app, ["train", str(config), "--local"])
    assert isinstance(done.exception, InvalidConfig)
    assert "n_stepz" in str(done.exception)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("query_encoder", "the query encoder's queries are not finite any more"),
        ("generator", "loss nan, gradient norm nan"),
    ],
)
def test_a_run_that_diverges_says_after_which_step(files: World, where: str, why: str) -> None:
    run = Run(files.settings(f"diverging-{where}"))

    def overflowing(step: int, scalars: Mapping[str, float]) -> None:
        if step == 2:
            with torch.no_grad():
                next(each for name, each in run.loop.parameters.items() if name.startswith(where)).fill_(torch.inf)

    with pytest.raises(TrainingDiverged, match=f"^after step 2: {why}$"):
        run.train(overflowing)
    run.close()


@pytest.mark.parametrize("where", ["RagLoss.to", "Loop.__init__", "Run._steps"])
def test_a_gpu_without_room_is_told_in_a_line(files: World, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so not tried again by Ray Train."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    owner, _, method = where.partition(".")
    monkeypatch.setattr({"RagLoss": RagLoss, "Loop": Loop, "Run": Run}[owner], method, full)
    with pytest.raises(StartupError, match=r"^a GPU's memory is full .*: CUDA out of memory. Tried .* GiB\.$"):
        train(files.settings("full"))
