"""What a key lets its holder do."""

from enum import StrEnum


class Scope(StrEnum):
    """None of them includes another."""

    ASK = "ask"
    RETRIEVE = "retrieve"
    PUBLISH = "publish"
    ADMIN = "admin"
