"""Every error that Forebay raises.

    ForebayError
    ├── InvalidRequest            what was asked for makes no sense
    │   ├── ConfigError           a setting is unknown or impossible
    │   ├── StateMismatch         a saved loader state does not fit this dataset
    │   ├── WrongState            what is asked for does not fit how things are now
    │   ├── KeyReused             an idempotency key stood for another request
    │   ├── TooLarge              a request larger than the API takes
    │   └── UnsupportedEncoding   a request that is compressed
    ├── Unauthorized              who asks is not known
    │   └── Forbidden             who asks is known, and may not do this
    ├── NotFound
    │   ├── ObjectNotFound        the key is not in the store
    │   ├── BucketNotFound        the bucket or directory is not there
    │   ├── EmptyDataset          no object under the prefix
    │   ├── DatasetNotFound       no dataset of that name
    │   └── NoCheckpoint          no committed, valid checkpoint
    ├── StoreError                a tier misbehaves
    │   ├── StoreUnreachable      nobody answers (tried again)
    │   ├── StoreBusy             503, 429, 500 (tried again)
    │   ├── AccessDenied          credentials are wrong or lack a right
    │   └── AlreadyExists         a conditional put lost
    ├── IntegrityError            bytes are not what they should be
    │   ├── ShortBody             fewer bytes than announced (tried again)
    │   ├── DigestMismatch        wrong bytes (tried again, then fails)
    │   ├── ObjectChanged         the object was replaced under its key
    │   └── ListingBroken         pages repeat, or come out of order
    ├── FormatError               a shard is not what its format says
    │   ├── TruncatedShard
    │   ├── DuplicateMember
    │   └── MissingField
    ├── CapacityError             no room
    │   ├── ShardTooLarge         one shard is larger than the tier
    │   ├── WorkingSetTooLarge    what must be held at once cannot fit
    │   ├── TierFull              everything held is in use or pinned
    │   ├── QuotaExceeded         the tenant may not hold that much
    │   └── DiskFull              the disk refuses
    ├── DaemonError
    │   ├── DaemonUnavailable     nobody listens on the socket
    │   ├── AlreadyRunning        another daemon owns this directory
    │   ├── ProtocolError         a message could not be understood
    │   ├── WaitTimeout           a wait reached its end
    │   │   └── RequestTimeout    a request that took too long to come
    │   ├── TooBusy               more requests than this service takes; come back later
    │   ├── WorkerLost            a loader's process, or the one that made its threads, is gone
    │   └── Cancelled             somebody called it off
    └── CheckpointError
        ├── SaveFailed            an earlier save did not reach its level
        ├── CheckpointCorrupt     a file does not match its digest
        └── UnsupportedValue      the state holds something that cannot be saved

Each has a `code` (stable, used on the wire and in metrics), an HTTP `status` and a `hint`: what
the user can do about it.
"""

from __future__ import annotations

from typing import ClassVar


class ForebayError(Exception):
    """Root of the tree; `str()` gives the message and the hint."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (from_code, (self.code, self.message, self.hint))


class InvalidRequest(ForebayError):
    code, status = "invalid_request", 400


class ConfigError(InvalidRequest):
    code = "config"
    default_hint = "`forebay config show` lists every setting"


class StateMismatch(InvalidRequest):
    code, status = "state_mismatch", 409


class WrongState(InvalidRequest):
    code, status = "wrong_state", 409


class KeyReused(InvalidRequest):
    code, status = "key_reused", 422
    default_hint = "take a new Idempotency-Key for a new request"


class TooLarge(InvalidRequest):
    code, status = "too_large", 413


class UnsupportedEncoding(InvalidRequest):
    code, status = "unsupported_encoding", 415


class Unauthorized(ForebayError):
    code, status = "unauthorized", 401
    default_hint = "send `Authorization: Bearer TOKEN`; `forebay token create` makes one"


class Forbidden(Unauthorized):
    code, status = "forbidden", 403
    default_hint = "ask for a token with that scope"


class NotFound(ForebayError):
    code, status = "not_found", 404


class ObjectNotFound(NotFound):
    code = "object_not_found"


class BucketNotFound(NotFound):
    code = "bucket_not_found"
    default_hint = "check the name, or create it first"


class EmptyDataset(NotFound):
    code = "empty_dataset"
    default_hint = "check the bucket and the prefix"


class DatasetNotFound(NotFound):
    code = "dataset_not_found"
    default_hint = "`forebay ls` shows the names; a URL registers a new one"


class NoCheckpoint(NotFound):
    code = "no_checkpoint"


class StoreError(ForebayError):
    code, status = "store", 502


class StoreUnreachable(StoreError):
    code, status = "store_unreachable", 503
    default_hint = "check that the server runs and that the endpoint (AWS_ENDPOINT_URL) is right"


class StoreBusy(StoreError):
    """`retry_after_s` is what the server asked for, when it did."""

    code, status = "store_busy", 503

    def __init__(self, message: str, *, hint: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class AccessDenied(StoreError):
    code, status = "access_denied", 403
    default_hint = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the policy of the bucket"


class AlreadyExists(StoreError):
    code, status = "already_exists", 409


class IntegrityError(ForebayError):
    code, status = "integrity", 502


class ShortBody(IntegrityError):
    code = "short_body"


class DigestMismatch(IntegrityError):
    code = "digest_mismatch"


class ObjectChanged(IntegrityError):
    code, status = "object_changed", 409
    default_hint = "register the dataset again to take the new version"


class ListingBroken(IntegrityError):
    code = "listing_broken"
    default_hint = "list again; when it stays, the server's listing is at fault"


class FormatError(ForebayError):
    code, status = "format", 422


class TruncatedShard(FormatError):
    code = "truncated_shard"


class DuplicateMember(FormatError):
    code = "duplicate_member"


class MissingField(FormatError):
    code = "missing_field"


class CapacityError(ForebayError):
    code, status = "capacity", 507
    default_hint = "raise stager.capacity, or give it a larger disk"


class ShardTooLarge(CapacityError):
    code = "shard_too_large"


class WorkingSetTooLarge(CapacityError):
    code = "working_set_too_large"
    default_hint = "raise stager.capacity, or lower shuffle_block of the loaders"


class TierFull(CapacityError):
    code = "tier_full"


class QuotaExceeded(CapacityError):
    code = "quota_exceeded"
    default_hint = "raise stager.quotas for that tenant"


class DiskFull(CapacityError):
    code = "disk_full"
    default_hint = "free space on that disk, or lower the capacity set for it"


class DaemonError(ForebayError):
    code, status = "daemon", 500


class DaemonUnavailable(DaemonError):
    code, status = "daemon_unavailable", 503
    default_hint = "start it: `forebay up`, or `forebay serve stager` and `forebay serve checkpoint`"


class AlreadyRunning(DaemonError):
    code, status = "already_running", 409


class ProtocolError(DaemonError):
    code, status = "protocol", 400


class WaitTimeout(DaemonError):
    code, status = "wait_timeout", 504


class RequestTimeout(WaitTimeout):
    code, status = "request_timeout", 408


class TooBusy(DaemonError):
    code, status = "too_busy", 429
    default_hint = "wait as long as Retry-After says"


class WorkerLost(DaemonError):
    code = "worker_lost"


class Cancelled(DaemonError):
    code, status = "cancelled", 409


class CheckpointError(ForebayError):
    code = "checkpoint"


class SaveFailed(CheckpointError):
    code = "save_failed"


class CheckpointCorrupt(CheckpointError):
    code, status = "checkpoint_corrupt", 502


class UnsupportedValue(CheckpointError):
    code, status = "unsupported_value", 422


def root_cause(err: BaseException) -> BaseException:
    """The first error inside nested groups: of several tasks that failed, one says it best."""
    while isinstance(err, BaseExceptionGroup):
        err = err.exceptions[0]
    return err


def _tree(cls: type[ForebayError]) -> dict[str, type[ForebayError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found |= _tree(sub)
    return found


_BY_CODE = _tree(ForebayError)


def from_code(code: str, message: str, hint: str = "") -> ForebayError:
    """The error that another process raised, as the same class here."""
    return _BY_CODE.get(code, ForebayError)(message, hint=hint)
