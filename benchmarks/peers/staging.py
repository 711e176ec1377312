"""Download every object below a prefix into a directory, by other clients.

Each runs in a process of its own (`python -m forebay.benchmarks.peers.staging NAME PREFIX FOLDER`)
and prints its seconds and CPU seconds from after its imports. Command line tools are timed whole:
their start is some ten milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

_THREADS = 16


class Took(msgspec.Struct, frozen=True):
    wall_s: float
    cpu_s: float


def measure(name: str, bucket: str, prefix: str, folder: Path) -> Took:
    """Run one peer. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "forebay.benchmarks.peers.staging", name, bucket, prefix, str(folder)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return msgspec.json.decode(answer, type=Took)


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def s5cmd(bucket: str, prefix: str, folder: Path) -> Callable[[], None]:
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    command = [_tool("s5cmd"), "--endpoint-url", endpoint, "cp", f"s3://{bucket}/{prefix}/*", f"{folder}/"]
    return partial(_run, command)


def rclone(bucket: str, prefix: str, folder: Path) -> Callable[[], None]:
    remote = f":s3,provider=Other,env_auth=true,endpoint='{os.environ['AWS_ENDPOINT_URL']}':{bucket}/{prefix}"
    command = [_tool("rclone"), "copy", "--transfers", str(_THREADS), "--checkers", "8", remote, str(folder)]
    return partial(_run, command)


def obstore(bucket: str, prefix: str, folder: Path) -> Callable[[], None]:
    import obstore as obs
    from obstore.store import S3Store

    store = S3Store(bucket, client_options={"allow_http": True})

    async def one(key: str, limit: asyncio.Semaphore) -> None:
        async with limit:
            body = await (await obs.get_async(store, key)).bytes_async()
            await asyncio.to_thread((folder / Path(key).name).write_bytes, body)

    async def main() -> None:
        limit = asyncio.Semaphore(_THREADS)
        metas = [meta async for page in obs.list(store, prefix) for meta in page]
        await asyncio.gather(*(one(meta["path"], limit) for meta in metas))

    return lambda: asyncio.run(main())


def s3fs(bucket: str, prefix: str, folder: Path) -> Callable[[], None]:
    import s3fs as library

    files = library.S3FileSystem(client_kwargs={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]})
    return lambda: files.get(f"{bucket}/{prefix}/", f"{folder}/", recursive=True)


def boto3(bucket: str, prefix: str, folder: Path) -> Callable[[], None]:
    import boto3 as library
    from botocore.config import Config

    config = Config(max_pool_connections=4 * _THREADS)
    client = library.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], config=config)

    def main() -> None:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        keys = [item["Key"] for page in pages for item in page["Contents"]]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda key: client.download_file(bucket, key, folder / Path(key).name), keys))

    return main


def s3torchconnector(bucket: str, prefix: str, folder: Path) -> Callable[[], None]:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    config = S3ClientConfig(force_path_style=True)
    client = S3Client("us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)

    def one(key: str) -> None:
        (folder / Path(key).name).write_bytes(client.get_object(bucket, key).read())

    def main() -> None:
        pages = client.list_objects(bucket, f"{prefix}/")
        keys = [item.key for page in pages for item in page.object_info]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(one, keys))

    return main


PEERS = {peer.__name__: peer for peer in (s5cmd, rclone, obstore, s3fs, boto3, s3torchconnector)}


def _cpu_s() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main() -> None:
    name, bucket, prefix, folder = sys.argv[1:]
    run = partial(PEERS[name], bucket, prefix, Path(folder))()
    began_at, cpu_s = time.perf_counter(), _cpu_s()
    run()
    print(json.dumps({"wall_s": time.perf_counter() - began_at, "cpu_s": _cpu_s() - cpu_s}))


if __name__ == "__main__":
    main()
