"""The choices that `openbook loadtest` has, by name."""

from enum import StrEnum


class What(StrEnum):
    """What is asked for: an answer, an answer token by token, or the passages alone."""

    ANSWER = "answer"
    STREAM = "stream"
    RETRIEVE = "retrieve"


class Arrivals(StrEnum):
    """How intended times are spread: at random and independent, evenly, or in bursts."""

    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"


class Check(StrEnum):
    """What answers to one question from one snapshot must share: text and passages, or scores and priors too."""

    TEXT = "text"
    BITS = "bits"
