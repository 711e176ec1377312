"""GPUs: there, driven, watched, and where the topology file says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from forebay.api.doctor.finding import Finding, Node
from forebay.api.doctor.topology import Device, check_file, devices

_DCGM = ("127.0.0.1", 9400)


def check_gpus(node: Node) -> Iterator[Finding]:
    gpus = [device for device in devices(node.sysfs) if device.is_gpu]
    if not gpus:
        yield Finding("gpu", "note", "this node has no GPU")
    else:
        yield Finding("gpu", "ok", f"{len(gpus)} GPUs: {', '.join(gpu.bus_id for gpu in gpus)}")
        yield from _driver(node, gpus)
        yield from _links(gpus)
        yield _dcgm()
    if file := node.env.get("NCCL_TOPO_FILE"):
        yield from check_topology(node, Path(file))


def check_topology(node: Node, file: Path) -> Iterator[Finding]:
    problems = list(check_file(file, node.sysfs))
    for problem in problems:
        yield Finding(
            "topology", "fail" if problem.wrong else "warn", f"{file}: {problem.what}",
            "NCCL builds its rings by it, and the loader places its threads by it",
            "`forebay nccl-topo > FILE` writes one from this machine",
        )  # fmt: skip
    if not problems:
        yield Finding("topology", "ok", f"{file} agrees with this machine")


def _driver(node: Node, gpus: list[Device]) -> Iterator[Finding]:
    if any(gpu.vendor == "0x10de" for gpu in gpus) and node.text("proc/driver/nvidia/version") is None:
        yield Finding(
            "gpu", "fail", "the NVIDIA driver is not loaded", "no job can use these GPUs", "modprobe nvidia"
        )


def _links(gpus: list[Device]) -> Iterator[Finding]:
    for gpu in gpus:
        if gpu.narrow:
            yield Finding(
                "gpu", "warn", f"GPU {gpu.bus_id} runs at x{gpu.width} of x{gpu.most_width}",
                "copies to it take longer than they should", "reseat it, or look at the riser and the BIOS",
            )  # fmt: skip


def _dcgm() -> Finding:
    try:
        with socket.create_connection(_DCGM, 1.0):
            return Finding("dcgm", "ok", "a DCGM exporter answers on port 9400")
    except OSError:
        return Finding(
            "dcgm", "note", "no DCGM exporter answers on port 9400",
            "GPU use beside Forebay's own metrics shows who waits for whom", "run dcgm-exporter on this node",
        )  # fmt: skip
