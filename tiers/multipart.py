"""Large files to S3 in parts that outlive the process that sends them.

https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html. Beside the file lies a record of
its upload; a later try asks S3 which parts it has, compares their MD5s with the file's, and sends the
rest. obstore knows no such thing, so this goes through botocore (`pip install 'forebay[aws]'`).
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import structlog
from anyio import to_thread

from forebay.core import metrics
from forebay.core.config import Settings, SourceSettings
from forebay.core.errors import (
    AccessDenied,
    BucketNotFound,
    DigestMismatch,
    ForebayError,
    ShortBody,
    StoreBusy,
    StoreError,
    StoreUnreachable,
    root_cause,
)
from forebay.core.failpoint import failpoint
from forebay.tiers.md5 import part_md5s
from forebay.tiers.store import Grant, ObjectInfo, check_key

log = structlog.get_logger()
T = TypeVar("T")

RECORD = ".upload"
_AT_ONCE = 4
_GONE = "NoSuchUpload"


class _Record(msgspec.Struct, frozen=True):
    """An upload that has begun: of what, to where."""

    url: str
    key: str
    upload_id: str
    part_bytes: int
    size_bytes: int
    changed_ns: int


class _Sent(msgspec.Struct, frozen=True):
    """An object that was put in parts, and the MD5 of each."""

    url: str
    key: str
    etag: str
    part_bytes: int
    md5s: list[str]


class _UploadGone(StoreError):
    code = "upload_gone"


class Multipart:
    """Of one bucket, below one prefix. Raises kinds of StoreError."""

    def __init__(
        self, url: str, bucket: str, prefix: str, settings: Settings, source: SourceSettings
    ) -> None:
        self._url = url
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = _client(settings, source)
        self._payer = {"RequestPayer": "requester"} if source.requester_pays else {}

    async def put(
        self, key: str, path: Path, part_bytes: int, grant: Grant | None, like: Path | None
    ) -> ObjectInfo:
        """The file under `key`; `grant` is awaited for each part that is sent."""
        known, md5s = await self._alike(path, part_bytes, like)
        record, there = await self._begun(key, path, part_bytes)
        starts = list(enumerate(range(0, record.size_bytes, part_bytes), start=1))
        etags: dict[int, str] = {}
        turns = anyio.CapacityLimiter(_AT_ONCE)

        async def part(number: int, start: int) -> None:
            async with turns:
                same = known and known.md5s[number - 1 : number] == md5s[number - 1 : number]
                if known and same and (copied := await self._copy(record, number, start, known)):
                    etags[number] = copied
                    return
                body = await to_thread.run_sync(
                    _read, path, start, min(part_bytes, record.size_bytes - start)
                )
                if number in there and there[number] == await to_thread.run_sync(_md5, body):
                    etags[number] = there[number]
                    return
                if grant:
                    await grant(len(body))
                etags[number] = await self._send(record, number, body)
                if md5s and etags[number] != md5s[number - 1]:
                    raise DigestMismatch(f"{self._url}/{key}: part {number} arrived as another")
                failpoint("multipart.sent")

        try:
            async with anyio.create_task_group() as tasks:
                for number, start in starts:
                    tasks.start_soon(part, number, start)
        except* ForebayError as errors:
            raise root_cause(errors) from None
        parts = [{"PartNumber": number, "ETag": f'"{etags[number]}"'} for number, _ in starts]
        answer = await self._ask(
            "complete_multipart_upload", key, UploadId=record.upload_id, MultipartUpload={"Parts": parts}
        )
        _record_of(path).unlink(missing_ok=True)
        if like:
            sent = _Sent(self._url, key, answer["ETag"], part_bytes, md5s)
            like.write_bytes(msgspec.json.encode(sent))
        return ObjectInfo(key, record.size_bytes, answer["ETag"])

    async def _alike(self, path: Path, part_bytes: int, like: Path | None) -> tuple[_Sent | None, list[str]]:
        """What was put last, if its parts can be compared, and the MD5s of this file's."""
        if like is None:
            return None, []
        md5s = [digest.hex() for digest in await to_thread.run_sync(part_md5s, path, part_bytes)]
        known = _decoded(like, _Sent)
        return known if known and (known.url, known.part_bytes) == (self._url, part_bytes) else None, md5s

    async def _copy(self, record: _Record, number: int, start: int, known: _Sent) -> str | None:
        """By S3 itself, from the object that was put last; None when it is to be sent after all.

        The ETag of a copied part need not be its MD5 (SeaweedFS, SSE-KMS): what vouches for it is that
        the source, at the version that was verified when it was put, had these bytes at this place.
        """
        end = min(start + record.part_bytes, record.size_bytes)
        try:
            answer = await self._ask(
                "upload_part_copy",
                record.key,
                UploadId=record.upload_id,
                PartNumber=number,
                CopySource={"Bucket": self._bucket, "Key": f"{self._prefix}{known.key}"},
                CopySourceRange=f"bytes={start}-{end - 1}",
                CopySourceIfMatch=known.etag,
            )
        except StoreError as err:
            log.info("part is sent, not copied", key=record.key, number=number, error=err.message)
            return None
        metrics.checkpoint_copied_bytes.inc(end - start)
        return str(answer["CopyPartResult"]["ETag"]).strip('"')

    async def _send(self, record: _Record, number: int, body: bytes) -> str:
        answer = await self._ask(
            "upload_part", record.key, UploadId=record.upload_id, PartNumber=number, Body=body
        )
        return str(answer["ETag"]).strip('"')

    async def _begun(self, key: str, path: Path, part_bytes: int) -> tuple[_Record, dict[int, str]]:
        """The upload that goes on, and the parts that are there; or a new one."""
        found = path.stat()
        record = _decoded(_record_of(path), _Record)
        wanted = (self._url, key, part_bytes, found.st_size, found.st_mtime_ns)
        if record and wanted == (
            record.url, record.key, record.part_bytes, record.size_bytes, record.changed_ns
        ):  # fmt: skip
            with suppress(_UploadGone):
                return record, await self._parts(record)
        answer = await self._ask("create_multipart_upload", check_key(key))
        record = _Record(self._url, key, answer["UploadId"], *wanted[2:])
        _record_of(path).write_bytes(msgspec.json.encode(record))
        return record, {}

    async def _parts(self, record: _Record) -> dict[int, str]:
        """ETags by part number."""
        found: dict[int, str] = {}
        marker = 0
        while True:
            answer = await self._ask(
                "list_parts", record.key, UploadId=record.upload_id, PartNumberMarker=marker
            )
            for part in answer.get("Parts", []):
                found[part["PartNumber"]] = part["ETag"].strip('"')
            if not answer.get("IsTruncated") or not answer.get("Parts"):
                log.info("upload goes on", key=record.key, parts=len(found))
                return found
            marker = answer["NextPartNumberMarker"]

    async def abandoned(self, prefix: str, older_s: float, ours: Callable[[str], bool]) -> int:
        """Abort what was begun below `prefix` long ago and never ended, if the key is `ours`."""
        answer = await self._ask("list_multipart_uploads", None, Prefix=f"{self._prefix}{prefix}")
        limit = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=older_s)
        aborted = 0
        for upload in answer.get("Uploads", []):
            key = upload["Key"].removeprefix(self._prefix)
            if upload["Initiated"] < limit and ours(key):
                with suppress(_UploadGone):
                    await self._ask("abort_multipart_upload", key, UploadId=upload["UploadId"])
                    aborted += 1
                    log.info("abandoned upload aborted", key=key)
        return aborted

    async def _ask(self, operation: str, key: str | None, **arguments: Any) -> dict[str, Any]:
        if key is not None:
            arguments["Key"] = f"{self._prefix}{key}"
        call = getattr(self._client, operation)
        with _translated(f"{self._url}/{key or ''}"):
            answer: dict[str, Any] = await to_thread.run_sync(
                lambda: call(Bucket=self._bucket, **self._payer, **arguments), abandon_on_cancel=True
            )
            return answer


def _client(settings: Settings, source: SourceSettings) -> Any:
    from botocore.config import Config
    from botocore.session import Session

    session = Session(profile=source.profile or os.environ.get("AWS_PROFILE"))
    timeout_s = settings.transfer.attempt_timeout_s
    endpoint = settings.s3.endpoint or os.environ.get("AWS_ENDPOINT_URL")
    config = Config(
        connect_timeout=5,
        read_timeout=timeout_s,
        # Forebay's own retries, so that one place counts and paces them.
        retries={"total_max_attempts": 1},
        s3={"addressing_style": "path" if endpoint else "auto"},
        proxies={"http": source.proxy, "https": source.proxy} if source.proxy else None,
        max_pool_connections=2 * _AT_ONCE,
        # The object's ETag is compared in the end; not every S3 knows the newer checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return session.create_client(
        "s3",
        region_name=settings.s3.region or os.environ.get("AWS_REGION", "us-east-1"),
        endpoint_url=endpoint,
        verify=str(source.ca_file) if source.ca_file else None,
        config=config,
    )


@contextmanager
def _translated(where: str) -> Iterator[None]:
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError

    try:
        yield
    except ClientError as err:
        code = err.response.get("Error", {}).get("Code", "")
        status = err.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        reason = f"{where}: {err}"
        if code == _GONE:
            raise _UploadGone(reason) from err
        if code == "NoSuchBucket":
            raise BucketNotFound(reason) from err
        if status in (401, 403):
            raise AccessDenied(reason) from err
        # A part that was taken and is not there: the next try finds out which, and sends that one.
        passing = status in (408, 429) or status >= 500 or code == "InvalidPart"
        raise (StoreBusy if passing else StoreError)(reason) from err
    except HTTPClientError as err:
        raise StoreUnreachable(f"{where}: {err}") from err
    except NoCredentialsError as err:
        raise AccessDenied(f"{where}: {err}") from err
    except BotoCoreError as err:
        raise StoreError(f"{where}: {err}") from err


def compared(like: Path, key: str, version: str) -> bool:
    """That object was put with this record: each part was compared when sent, or copied from one that was."""
    sent = _decoded(like, _Sent)
    return sent is not None and (sent.key, sent.etag) == (key, version)


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{RECORD}")


def _decoded(path: Path, kind: type[T]) -> T | None:
    """None for a record that is not there, or not to be read: it only saves work."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def _read(path: Path, start: int, length: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        body = os.pread(file.fileno(), length, start)
    if len(body) != length:
        raise ShortBody(f"{path} ends at byte {start + len(body)}, expected {start + length}")
    return body
