"""What `openbook train CONFIG` reads: validated settings, in one YAML file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from openbook.config import MAX_THREADS, IndexClientSettings, Positive, Section
from openbook.core.types import Formulation

Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class QuestionFile(Section):
    """A file of questions (see `openbook.corpus.questions`), or one of KILT's."""

    path: Path
    repeat: Positive = 1  # how often an epoch goes through it
    limit: Positive | None = None  # only so many of its questions, drawn with the run's seed


class TaskSettings(Section):
    """What is asked and what counts as the answer (sections 3.1 to 3.4)."""

    # question_answering: every pair of a question and one of its answers is an example. abstractive: the same, answers
    # are sentences. question_generation: from the answer to the question, as in Jeopardy. classification: answers are
    # labels.
    kind: Literal["question_answering", "abstractive", "question_generation", "classification"] = "question_answering"
    train: Annotated[tuple[QuestionFile, ...], Field(min_length=1)]  # files of questions to learn from
    validation: tuple[QuestionFile, ...] = ()  # files of questions held back to measure with
    # Of classification: the label in the file and the word for it; questions with other labels are left out.
    labels: dict[str, str] = Field(default_factory=dict)
    max_answers: Positive = 4  # of one question, as examples
    max_target_tokens: Positive = 64

    @model_validator(mode="after")
    def _labels_for_classes(self) -> "TaskSettings":
        if (self.kind == "classification") != bool(self.labels):
            raise ValueError(f"labels are for classification, and needed there; got kind {self.kind!r}, {self.labels}")
        return self


class RetrieverSettings(Section):
    """Where passages come from."""

    # dense: the index, asked with the query encoder as it is at every step. bm25: in its place, scores as logits.
    # given: the question's own passage. none: the generator alone.
    kind: Literal["dense", "bm25", "given", "none"] = "dense"
    k: Positive = 5  # passages for each question
    index: IndexClientSettings = IndexClientSettings()  # servers to ask
    snapshot: Path | None = None  # or one in memory, searched exactly; bm25 reads the passages of one
    retry_s: Annotated[float, Field(ge=0)] = 60.0  # a step waits so long for shards that are gone or busy

    @model_validator(mode="after")
    def _has_passages(self) -> "RetrieverSettings":
        if self.kind == "dense" and self.index.names_servers == (self.snapshot is not None):
            raise ValueError("dense needs index.addresses or a snapshot, one of them")
        if self.kind == "bm25" and self.snapshot is None:
            raise ValueError("bm25 needs a snapshot, whose passages it searches")
        return self


class ModelsSettings(Section):
    """What is trained, and how far."""

    query_encoder: str = "embedded"  # 'embedded', a hub name, or a folder
    passage_model: str = ""  # the encoder of the index's passages; empty: what `query_encoder` says, or is known of it
    generator: str = "embedded"  # 'embedded', a hub name, or a folder
    formulation: Formulation = Formulation.SEQUENCE  # of the loss
    train_query_encoder: bool = True  # False: the frozen retriever
    train_generator: bool = True  # false keeps the generator as it is
    # Patterns of parameter names that keep their values: "generator.*embeddings*", "query_encoder.*.layer.[0-2].*"
    frozen: tuple[str, ...] = ()
    saved_dtype: Literal["float32", "float16"] = "float32"  # of RAG's models written beside the embedded encoder
    # In the generator, as its config says, while queries are encoded without; in both encoders of a bi-encoder.
    dropout: bool = True


class BiEncoderSettings(Section):
    """Query and passage encoder, trained together as DPR (Karpukhin et al. 2020), in RAG's place.

    `retrieval` then says where BM25 finds negatives: a snapshot, and how many of its passages are looked through (k).
    """

    passage_encoder: str | None = None  # with none, the query encoder reads passages too: one tower for both
    n_negatives: Annotated[int, Field(ge=0)] = 1  # hard ones of each question, beside those of its micro-batch
    n_validation_passages: Annotated[int, Field(ge=0)] = 1000  # of the snapshot, among which positives are looked for


class OptimizerSettings(Section):
    """AdamW; without decay it is Adam, as in the paper (appendix D)."""

    learning_rate: Rate = 3e-5  # of AdamW, at its highest
    # Other rates for parameters whose names match: {"query_encoder.*": 1e-5}. The first match counts.
    learning_rates: dict[str, Rate] = Field(default_factory=dict)
    weight_decay: Rate = 0.0  # of matrices; biases and normalisations have none
    betas: tuple[Decay, Decay] = (0.9, 0.999)  # AdamW's
    epsilon: Annotated[float, Field(gt=0)] = 1e-8  # AdamW's
    max_gradient_norm: Annotated[float, Field(gt=0)] = 1.0  # longer gradients are scaled to this
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # in which the learning rate rises from 0
    decay: Literal["constant", "linear", "cosine"] = "linear"  # after the warm-up, to 0 at the last step
    label_smoothing: Share = 0.0


class LoopSettings(Section):
    """How long, in which portions, and what is kept."""

    out: Path  # checkpoints, curves, and at the end the models
    n_steps: Positive  # in all
    batch_size: Positive = 32  # of all workers together
    micro_batch_size: Positive = 8  # examples that a worker retrieves passages for at once
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the products; weights and log-probabilities stay float32
    # Compute encoders twice rather than keep what they computed. By default only a bi-encoder does, which computes a
    # whole micro-batch together; RAG keeps no more than a few thousand tokens, or one question's, at a time.
    gradient_checkpointing: bool | None = None
    device: str = "auto"  # auto, cpu, cuda, cuda:0 ...; with workers.use_gpu auto or cuda: each has its own
    n_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] = 1  # of torch
    seed: Annotated[int, Field(ge=0)] = 0  # equal seeds give equal runs: on CPUs to the bit, on GPUs up to rounding
    checkpoint_every: Positive = 200  # steps
    n_checkpoints: Positive = 2  # kept
    validate_every: Positive = 200  # so many steps
    n_validation: Positive = 200  # questions, the same ones each time

    @model_validator(mode="after")
    def _divides(self) -> "LoopSettings":
        if self.batch_size % self.micro_batch_size:
            limit = f"a divisor of batch_size = {self.batch_size}"
            raise ValueError(f"micro_batch_size must be {limit}, got {self.micro_batch_size}")
        return self


class WorkersSettings(Section):
    """Ray Train's workers."""

    n_workers: Positive = 1  # processes of Ray Train
    num_cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  # reserved by each
    use_gpu: bool = False  # one for each worker
    max_failures: Annotated[int, Field(ge=-1)] = 3  # of workers, until the run fails; -1: never


class TrainingSettings(Section):
    """All of a run."""

    task: TaskSettings
    retrieval: RetrieverSettings
    models: ModelsSettings = ModelsSettings()
    biencoder: BiEncoderSettings | None = None  # none: RAG
    optimizer: OptimizerSettings = OptimizerSettings()
    loop: LoopSettings
    workers: WorkersSettings = WorkersSettings()

    @model_validator(mode="after")
    def _whole_shares(self) -> "TrainingSettings":
        n_micro_batches = self.loop.batch_size // self.loop.micro_batch_size
        if n_micro_batches % self.workers.n_workers:
            raise ValueError(
                f"workers.n_workers must divide the {n_micro_batches} micro-batches of a batch, "
                f"got {self.workers.n_workers}"
            )
        if self.biencoder is None and not (self.models.train_generator or self.trains_query_encoder):
            raise ValueError("nothing is trained: neither the generator nor the query encoder")
        return self

    @model_validator(mode="after")
    def _biencoder_has_negatives(self) -> "TrainingSettings":
        if (own := self.biencoder) is None:
            return self
        if self.retrieval.kind != "bm25":
            raise ValueError(f"a bi-encoder's negatives are of retrieval.kind bm25, got {self.retrieval.kind!r}")
        if self.optimizer.label_smoothing:
            raise ValueError(f"label_smoothing is of a generator's tokens, got {self.optimizer.label_smoothing}")
        if self.models.saved_dtype != "float32":
            raise ValueError(f"saved_dtype must be float32 for a bi-encoder, got {self.models.saved_dtype}")
        if not (own.passage_encoder or self.models.train_query_encoder):
            needed = "true for the one tower that there is without biencoder.passage_encoder"
            raise ValueError(f"models.train_query_encoder must be {needed}, got false")
        if own.n_negatives == 0 and self.loop.micro_batch_size == 1:
            needed = "at least 1 with loop.micro_batch_size = 1, where no other question has any"
            raise ValueError(f"biencoder.n_negatives must be {needed}, got 0")
        return self

    @property
    def recomputes(self) -> bool:
        """Whether gradients are checkpointed."""
        asked = self.loop.gradient_checkpointing
        return self.biencoder is not None if asked is None else asked

    @property
    def trains_query_encoder(self) -> bool:
        """Only a dense prior has gradients for it."""
        return self.models.train_query_encoder and self.retrieval.kind == "dense"
