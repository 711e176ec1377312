"""Storage and training traffic apart, and a kernel that lets a fast card run.

NCCL_SOCKET_IFNAME and NCCL_IB_HCA: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator

from forebay.api.doctor.finding import Finding, Node
from forebay.api.doctor.sources import endpoint, wanted
from forebay.core.units import format_bytes
from forebay.tiers.store import normalize_url

_SIOCGIFADDR = 0x8915
_BUFFER_BYTES = 16 << 20
_FAST_MBPS = 10_000


def check_interfaces(node: Node) -> Iterator[Finding]:
    """Which interface storage traffic leaves by, against the ones that NCCL is told to use."""
    storage = _storage_interfaces(node)
    spec = node.env.get("NCCL_SOCKET_IFNAME", "")
    training = [name for name in _interfaces(node) if spec and chosen(name, spec)]
    if not spec:
        yield Finding(
            "interfaces",
            "note",
            "NCCL_SOCKET_IFNAME is not set",
            "NCCL picks an interface by itself, perhaps storage's",
            "set it to the training network's, for example NCCL_SOCKET_IFNAME==ens5",
        )
    elif not training:
        yield Finding(
            "interfaces",
            "fail",
            f"NCCL_SOCKET_IFNAME={spec} fits no interface of this node",
            "NCCL will not start",
            f"one of {', '.join(_interfaces(node))}",
        )
    shared = sorted(set(training) & storage)
    if shared:
        yield Finding(
            "interfaces",
            "warn",
            f"storage and NCCL share {', '.join(shared)}",
            "fetches and checkpoints slow each collective down",
            "give storage its own interface and route",
        )
    elif training:
        by = (
            f"storage leaves by {', '.join(sorted(storage))}"
            if storage
            else "no source is reached over the network"
        )
        yield Finding("interfaces", "ok", f"NCCL uses {', '.join(training)}, {by}")
    yield from _adapters(node)


def _adapters(node: Node) -> Iterator[Finding]:
    folder = node.sysfs / "class/infiniband"
    there = sorted(place.name for place in folder.iterdir()) if folder.is_dir() else []
    spec = node.env.get("NCCL_IB_HCA", "")
    if spec and not any(chosen(name, spec) for name in there):
        has = ", ".join(there) or "none"
        yield Finding(
            "interfaces",
            "fail",
            f"NCCL_IB_HCA={spec} fits no adapter of this node ({has})",
            "NCCL falls back to sockets, far slower",
            "correct it, or load the adapter's driver",
        )
    elif there and not spec:
        yield Finding(
            "interfaces",
            "note",
            f"InfiniBand adapters: {', '.join(there)}; NCCL_IB_HCA is not set",
            "NCCL may take an adapter that carries storage",
            "`forebay nccl-topo` prints what belongs there",
        )


def chosen(name: str, spec: str) -> bool:
    """As NCCL reads it: `eth,ens` are beginnings of names, `=eth0` whole ones, `^` turns it round."""
    exclude, exact = spec.startswith("^"), spec.lstrip("^").startswith("=")
    # A port may follow an adapter: mlx5_0:1.
    words = [word.split(":")[0] for word in spec.lstrip("^").lstrip("=").split(",") if word]
    fits = any(name == word if exact else name.startswith(word) for word in words)
    return fits != exclude


def _interfaces(node: Node) -> list[str]:
    folder = node.sysfs / "class/net"
    return sorted(place.name for place in folder.iterdir() if place.name != "lo") if folder.is_dir() else []


def _storage_interfaces(node: Node) -> set[str]:
    found = set()
    for url in wanted(node):
        place = endpoint(normalize_url(url), node.settings, node.env.get("AWS_ENDPOINT_URL"))
        if place and (name := _leaving_by(*place)):
            found.add(name)
    return found


def _leaving_by(host: str, port: int) -> str | None:
    """The interface whose address the kernel would send from; nothing is sent. IPv4 only."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((host, port))
            ours = sock.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address(sock, name) == ours:
                    return name
    except OSError:
        return None
    return None


def _address(sock: socket.socket, name: str) -> str | None:
    try:
        found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(found[20:24])


def check_kernel(node: Node) -> Iterator[Finding]:
    """Buffers of sockets, where a card is fast enough to need them."""
    speeds = {name: node.number(f"sys/class/net/{name}/speed") or 0 for name in _interfaces(node)}
    fast = [name for name, mbps in speeds.items() if mbps >= _FAST_MBPS]
    for key in ("rmem_max", "wmem_max"):
        size_bytes = node.number(f"proc/sys/net/core/{key}")
        if fast and size_bytes is not None and size_bytes < _BUFFER_BYTES:
            yield Finding(
                "kernel",
                "warn",
                f"net.core.{key} is {format_bytes(size_bytes)}",
                f"one stream cannot fill {', '.join(fast)}",
                f"sysctl net.core.{key}={_BUFFER_BYTES}",
            )
    for name in fast:
        mtu = node.number(f"sys/class/net/{name}/mtu")
        if mtu is not None and mtu < 9000:
            yield Finding(
                "kernel",
                "note",
                f"{name} has an MTU of {mtu}",
                "more packets, so more of a core, per gigabyte",
                f"ip link set {name} mtu 9000, where the whole network does so",
            )
    need_mbps = node.need_bps * 8 // 1_000_000
    if need_mbps and speeds and max(speeds.values()) and max(speeds.values()) < need_mbps:
        yield Finding(
            "kernel",
            "fail",
            f"the fastest interface has {max(speeds.values())} Mbit/s, {need_mbps} are needed",
            "the hot tier cannot be filled as fast as it is read",
            "a second epoch from the hot tier still can",
        )
