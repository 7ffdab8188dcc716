"""Every error that openbook raises on purpose, with the gRPC code and HTTP status it turns into.

    OpenbookError               INTERNAL             500   never raised itself
    ├── InvalidRequest          INVALID_ARGUMENT     400   the caller's fault: names the thing, the value and the limit
    │   └── BodyTooLarge                             413   over HTTP: more bytes than any request needs
    ├── Unauthenticated         UNAUTHENTICATED      401   nobody knows who asks: no key, a wrong or an expired one
    ├── PermissionDenied        PERMISSION_DENIED    403   known, and not allowed: names the scope that is needed
    ├── UnknownPassage          NOT_FOUND            404   an id that the snapshot does not hold
    ├── Overloaded              RESOURCE_EXHAUSTED   429   no place, or the answer would be late; nothing was done
    │   └── QuotaExceeded                            429   the caller has asked for all that he may ask for
    ├── DeadlineExceeded        DEADLINE_EXCEEDED    504   the answer would come too late to be of use
    │   └── BodyTooSlow                              408   over HTTP: the request itself took too long to arrive
    ├── ShardUnavailable        UNAVAILABLE          503   no replica of a shard answers
    ├── ModelUnavailable        UNAVAILABLE          503   no replica of the encoder or the generator answers
    ├── KeysUnavailable         UNAVAILABLE          503   who asks cannot be looked up
    ├── SnapshotMismatch        FAILED_PRECONDITION  503   shards or encoder belong to different snapshots
    └── StartupError            FAILED_PRECONDITION  500   stops a process at its start, before it serves
        ├── InvalidConfig                                  a setting; names file, key and value
        ├── InvalidDocuments                               a corpus that cannot be read; names file and line
        ├── InvalidSnapshot                                missing, truncated or altered files
        ├── InvalidModel                                   an encoder or generator that cannot be loaded
        └── PortInUse

gRPC codes stand here by name, so that this module needs nothing but the standard library.
"""

import math
from typing import ClassVar


class OpenbookError(Exception):
    """Base of all errors raised on purpose."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500


class InvalidRequest(OpenbookError):
    """The request cannot be served as it stands; the same request will fail again."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class BodyTooLarge(InvalidRequest):
    """More bytes than any request needs."""

    http_status = 413


class Unauthenticated(OpenbookError):
    """Nobody knows who asks."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(OpenbookError):
    """Who asks is known, and may not; names the scope that is needed."""

    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class UnknownPassage(OpenbookError):
    """A passage id that the snapshot does not hold."""

    grpc_code = "NOT_FOUND"
    http_status = 404


class Overloaded(OpenbookError):
    """No place in a bounded queue, or none from which it would be ready in time. Nothing was done; try again later."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def retry_after_whole_s(self) -> int:
        """As a header says it: at least 1."""
        return max(1, math.ceil(self.retry_after_s))

    def __reduce__(self) -> tuple[type["Overloaded"], tuple[str, float]]:
        return type(self), (str(self), self.retry_after_s)


class QuotaExceeded(Overloaded):
    """The caller has asked for all that he may ask for, until the next window."""


class DeadlineExceeded(OpenbookError):
    """The deadline passed, or would pass, before the answer."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class BodyTooSlow(DeadlineExceeded):
    """The request itself took too long to arrive."""

    http_status = 408


class ShardUnavailable(OpenbookError):
    """No replica of a shard answers."""

    grpc_code = "UNAVAILABLE"
    http_status = 503


class ModelUnavailable(OpenbookError):
    """No replica of the encoder or the generator answers."""

    grpc_code = "UNAVAILABLE"
    http_status = 503


class KeysUnavailable(OpenbookError):
    """Who asks cannot be looked up, and so is not let in."""

    grpc_code = "UNAVAILABLE"
    http_status = 503


class SnapshotMismatch(OpenbookError):
    """Shards, or shards and encoder, belong to different snapshots."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 503


class StartupError(OpenbookError):
    """Stops a process before it serves."""

    grpc_code = "FAILED_PRECONDITION"


class InvalidConfig(StartupError):
    """A setting out of its range or unknown; names file, key and value."""


class InvalidDocuments(StartupError):
    """A corpus that cannot be read; names file and line."""


class InvalidSnapshot(StartupError):
    """A snapshot with missing, truncated or altered files, or of another format version."""


class InvalidModel(StartupError):
    """An encoder or generator that cannot be loaded or is not what it claims to be."""


class PortInUse(StartupError):
    """Another process listens on the address."""


def _all_subclasses(root: type[OpenbookError]) -> list[type[OpenbookError]]:
    return [c for child in root.__subclasses__() for c in (child, *_all_subclasses(child))]


def from_grpc_code(code: str, message: str, name: str = "") -> OpenbookError:
    """The error that a peer of ours sent as this code, and by this name if it said any; OpenbookError for codes that
    none of ours has.

    Without a name FAILED_PRECONDITION comes back as SnapshotMismatch: a server that failed to start sends nothing; and
    UNAVAILABLE as ShardUnavailable, whatever did not answer.
    """
    ours = [each for each in _all_subclasses(OpenbookError) if each.__module__ == __name__]  # training's cross no wire
    of_code = [each for each in ours if each.grpc_code == code]
    kind = next((each for each in of_code if each.__name__ == name), next(iter(of_code), None))
    return kind(message) if kind else OpenbookError(f"{code}: {message}")


def reason(error: BaseException) -> str:
    """Why a file could not be read or written, without its path, which our messages name."""
    return getattr(error, "strerror", None) or str(error)
