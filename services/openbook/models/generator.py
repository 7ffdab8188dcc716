"""The generator: questions with their passages to answers, text in and text out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from openbook.config import GeneratorSettings
from openbook.core.confidence import UNFITTED, Calibration
from openbook.core.deadline import Check, go_on
from openbook.core.fingerprint import json_digest
from openbook.core.spelling import Letters, letters_of, spans
from openbook.core.types import (
    Classification,
    Formulation,
    Generation,
    GenerationSettings,
    Passage,
    Retrieved,
    Token,
    check_labels,
    shown,
)
from openbook.errors import InvalidRequest
from openbook.models import decoding
from openbook.models.checkpoint import GeneratorCheckpoint, load_generator, place, use_threads
from openbook.models.confidence import load_calibration
from openbook.models.decoding import Decoded, DecodedToken
from openbook.models.formats import pad
from openbook.models.seq2seq import Seq2Seq
from openbook.processes import threads


class RagGenerator:
    """A generator and how it is asked. Not for several threads at once."""

    def __init__(self, checkpoint: GeneratorCheckpoint, settings: GeneratorSettings) -> None:
        self.fingerprint = checkpoint.fingerprint  # of all its bytes: seconds where they are many
        """Digest of weights, tokenizer and input format; not of dtype or device."""
        self.calibration: Calibration = UNFITTED
        """How probable it is that its answers are right, where that was fitted."""
        self.input_format = checkpoint.input_format
        self._checkpoint = checkpoint
        model = place(checkpoint.model, settings)
        self._model = Seq2Seq(model)
        dtype, special = str(model.dtype).removeprefix("torch."), json_digest(asdict(self._model.special))
        self.generates_by = f"{self.fingerprint}-{dtype}-{special[:16]}"
        """The fingerprint, the dtype that it computes in, and with which tokens answers begin and end."""
        self._max_tokens_in_flight = settings.max_tokens_in_flight
        self._n_threads = threads(settings.n_threads)

    @classmethod
    def load(cls, settings: GeneratorSettings) -> Self:
        """Load `settings.model`: "embedded", a folder, or a hub name, and its `confidence.json`.

        Raises:
            InvalidModel: as `load_generator`, and as `load_calibration`.
        """
        generator = cls(load_generator(settings.model), settings)
        generator.calibration = load_calibration(settings.model, generator.fingerprint)
        return generator

    def generate(
        self,
        questions: Sequence[str],
        retrieved: Sequence[Retrieved],
        settings: GenerationSettings,
        check: Check = go_on,
    ) -> list[Generation]:
        """The best answers to each question from its own passages, of which there may be different numbers.

        With labels it is the most probable one of them, weighed as in `classify`. No answer is longer than the decoder
        has positions, whatever max_new_tokens says. `check` stops the work by raising: see `Seq2Seq.stopped_by`.

        Raises:
            InvalidRequest: a question leaves no room for a passage in the input, or has no passage; a label has more
                than max_new_tokens, or is refused by `classify`.
        """
        if not questions:
            return []
        settings = self._bounded(settings)
        if settings.labels:
            return self._choose(questions, retrieved, settings, check)
        inputs = self._inputs(questions, retrieved)
        model = self._model.stopped_by(check)
        decoded = decoding.generate_several(
            model, *inputs, settings, settings.n_answers, max_tokens=self._max_tokens_in_flight
        )
        return [self._several(each, r.passages, settings, check) for each, r in zip(decoded, retrieved, strict=True)]

    def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, check: Check = go_on
    ) -> Iterator[Token | Generation]:
        """Tokens as they are decided (RAG-Token, greedy or sampled), the whole generation last. Else as `generate`.

        The texts of the tokens, joined, are the text of the generation; where tokens know no capitals, that of the
        generation has them as the passages do.
        """
        if settings.labels or settings.n_answers > 1:
            yield from self.generate([question], [retrieved], settings, check)
            return
        settings = self._bounded(settings)
        ids, mask, scores = self._inputs([question], [retrieved])
        token_ids: list[int] = []
        text = ""
        for item in decoding.stream(self._model.stopped_by(check), ids, mask, scores[0], settings):
            if isinstance(item, DecodedToken):
                token_ids.append(item.token_id)
                before, text = text, self._checkpoint.text(token_ids)
                yield Token(text[len(before) :], item.log_likelihood, tuple(item.log_posterior.tolist()))
            else:
                yield self._generation(item, retrieved.passages, settings)

    def classify(
        self, questions: Sequence[str], retrieved: Sequence[Retrieved], labels: Sequence[str], formulation: Formulation
    ) -> list[Classification]:
        """The probability of each label as the answer to each question, from its own passages (sections 2.3 and 3.4).

        Labels of one token each are scored without end-of-sequence, as in the paper, where both formulations agree;
        as soon as one has more, end-of-sequence is part of all of them.

        Raises:
            InvalidRequest: there is no label, one is empty or has more tokens than the decoder has positions, or two
                are alike to the tokenizer; and as `generate`.
        """
        answers = self._labels(labels, self._checkpoint.max_answer_tokens)
        if not questions:
            return []
        scored = self._score(questions, retrieved, answers, formulation, go_on)
        return [_classification(labels, each, len(r.passages)) for each, r in zip(scored, retrieved, strict=True)]

    def _bounded(self, settings: GenerationSettings) -> GenerationSettings:
        longest = self._checkpoint.max_answer_tokens or settings.max_new_tokens
        fewest = min(settings.min_new_tokens, longest)
        return replace(settings, max_new_tokens=min(settings.max_new_tokens, longest), min_new_tokens=fewest)

    def _choose(
        self, questions: Sequence[str], retrieved: Sequence[Retrieved], settings: GenerationSettings, check: Check
    ) -> list[Generation]:
        answers = self._labels(settings.labels, settings.max_new_tokens)
        chosen = []
        scored = self._score(questions, retrieved, answers, settings.formulation, check)
        for each, passages in zip(scored, (r.passages for r in retrieved), strict=True):
            classification = _classification(settings.labels, each, len(passages))
            best = self._generation(
                each[settings.labels.index(classification.label)], passages, settings, spelled=classification.label
            )
            chosen.append(replace(best, classification=classification))
        return chosen

    def _score(
        self,
        questions: Sequence[str],
        retrieved: Sequence[Retrieved],
        answers: Sequence[Sequence[int]],
        formulation: Formulation,
        check: Check,
    ) -> list[list[Decoded]]:
        inputs = self._inputs(questions, retrieved)
        model = self._model.stopped_by(check)
        return decoding.score_answers(model, *inputs, answers, formulation, max_tokens=self._max_tokens_in_flight)

    def _labels(self, labels: Sequence[str], most: int | None) -> list[list[int]]:
        """Their tokens, at most so many of each."""
        check_labels(labels)
        answers = [self._checkpoint.answer_ids(label) for label in labels]
        if not all(answers) or len(set(map(tuple, answers))) < len(labels):
            raise InvalidRequest(f"labels must differ in their tokens, and none have none, got {shown(labels)}")
        if max(map(len, answers)) > 1:
            answers = [[*answer, self._model.special.eos[0]] for answer in answers]
        for label, answer in zip(labels, answers, strict=True):
            if most is not None and len(answer) > most:
                is_full = most == self._checkpoint.max_answer_tokens
                name = "the generator's positions" if is_full else "max_new_tokens"
                raise InvalidRequest(
                    f"labels must have at most {name} = {most} tokens, got {len(answer)} in {label[:100]!r}"
                )
        return answers

    def _inputs(self, questions: Sequence[str], retrieved: Sequence[Retrieved]) -> tuple[Tensor, Tensor, Tensor]:
        """Context ids and mask (n * k, l) and scores (n, k), k and l those of the largest; what is missing is empty."""
        use_threads(self._n_threads)  # an encoder in this process has its own number
        k = max(len(each.passages) for each in retrieved)
        scores = torch.full((len(questions), k), -torch.inf)
        contexts: list[list[int]] = []
        for row, (question, each) in enumerate(zip(questions, retrieved, strict=True)):
            n_hits = len(each.passages)
            if not n_hits:
                raise InvalidRequest("a question must have at least one passage to be answered from, got none")
            scores[row, :n_hits] = torch.tensor(each.scores)  # a copy: what crossed a process is read-only
            contexts += self._checkpoint.contexts(question, each.passages)
            contexts += [[]] * (k - n_hits)
        return *pad(contexts, self._model.special.pad), scores

    def _several(
        self, answers: Sequence[Decoded], passages: Sequence[Passage], settings: GenerationSettings, check: Check
    ) -> Generation:
        generations, letters = [], cache(letters_of)
        for each in answers:  # the texts of many long ones take as long as a step of decoding
            check()
            generations.append(self._generation(each, passages, settings, letters=letters))
        return replace(generations[0], others=tuple(generations[1:]))

    def _generation(
        self,
        decoded: Decoded,
        passages: Sequence[Passage],
        settings: GenerationSettings,
        spelled: str | None = None,
        letters: Callable[[str], Letters] = letters_of,
    ) -> Generation:
        n_hits, ids, special = len(passages), decoded.token_ids, self._model.special
        ends = ids[-1] in special.eos
        if spelled is None:
            spelled = self._checkpoint.answer(ids, passages, decoded.log_posterior, letters)
        beginnings = [self._checkpoint.text(ids[: t + 1]) for t in range(len(ids))]
        texts = (text[len(before) :] for before, text in pairwise(["", *beginnings]))
        log_likelihood, log_posterior = decoded.token_log_likelihood, decoded.token_log_posterior[:, :n_hits]
        rows = zip(texts, log_likelihood.tolist(), map(tuple, log_posterior.tolist()), strict=True)
        places = spans(beginnings, spelled)
        return Generation(
            spelled,
            ids,
            decoded.log_likelihood,
            decoded.log_prior[:n_hits].copy(),  # a view would keep those of the whole batch
            decoded.log_posterior[:n_hits].copy(),
            tuple(Token(*row, *place) for row, place in zip(rows, places, strict=True)),
            ended=ends or len(ids) == self._checkpoint.max_answer_tokens,
            cut=not settings.labels
            and len(ids) == settings.max_new_tokens
            and not (ends and special.forced_eos is None),
        )


def _classification(labels: Sequence[str], scored: Sequence[Decoded], n_hits: int) -> Classification:
    log_likelihood = np.array([each.log_likelihood for each in scored])
    return Classification(
        tuple(labels),
        log_likelihood,
        log_likelihood - np.logaddexp.reduce(log_likelihood),
        scored[0].log_prior[:n_hits].copy(),
        np.stack([each.log_posterior[:n_hits] for each in scored]),
    )
