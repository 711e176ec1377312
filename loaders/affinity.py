"""Which CPUs are near this rank's GPU: where its loader's threads and its page-locked memory belong.

From NCCL's topology file where NCCL_TOPO_FILE names one (`<system>` of `<cpu numaid affinity>` of `<pci
busid>`; https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), else from sysfs. Memory follows
the thread that first writes to it. Whatever is missing or makes no sense is said, and nothing is placed.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import torch

from forebay.core.errors import ConfigError
from forebay.loaders.pool import cuda_runs

log = logging.getLogger("forebay.loaders")

_SYSFS = Path("/sys")
_LARGEST_FILE_BYTES = 16 << 20
_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)


def cpus_for_this_rank() -> frozenset[int]:
    """Of those that this process may use; none where nothing is known, or no GPU is in use."""
    if not cuda_runs():
        return frozenset()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in found:
        return frozenset()
    domain, bus, device = found
    topology = os.environ.get("NCCL_TOPO_FILE")
    return usable(f"{domain:04x}:{bus:02x}:{device:02x}.0", Path(topology) if topology else None)


def usable(bus_id: str, topology: Path | None, sysfs: Path = _SYSFS) -> frozenset[int]:
    """CPUs near a PCI device, within this process's own. What is wrong is logged, not raised."""
    try:
        near = near_by_topology(bus_id, topology, sysfs) if topology else near_by_sysfs(bus_id, sysfs)
    except ConfigError as err:
        log.warning("threads are not placed near the GPU: %s", err)
        return frozenset()
    mine = frozenset(near & os.sched_getaffinity(0))
    if near and not mine:
        log.warning("threads are not placed near GPU %s: this process may use none of its CPUs", bus_id)
    return mine


def near_by_topology(bus_id: str, file: Path, sysfs: Path = _SYSFS) -> set[int]:
    """Raises ConfigError for a file that cannot be read, or that does not know the device."""
    wanted = _normal(bus_id, file)
    for cpu in _system(file).iter("cpu"):
        if any(_normal(pci.get("busid", ""), file) == wanted for pci in cpu.iter("pci")):
            # Virtual machines leave the mask out, or empty.
            return _of_mask(cpu.get("affinity", ""), file) or _of_node(cpu.get("numaid", "-1"), sysfs)
    raise ConfigError(f"NCCL_TOPO_FILE {file} has no PCI device {bus_id}")


def near_by_sysfs(bus_id: str, sysfs: Path = _SYSFS) -> set[int]:
    """Nothing where the machine has one node, or does not tell."""
    device = sysfs / "bus/pci/devices" / bus_id
    if (_text(device / "numa_node") or "-1") == "-1":
        return set()
    return _of_list(_text(device / "local_cpulist") or "", device)


def _system(file: Path) -> ElementTree.Element:
    try:
        if file.stat().st_size > _LARGEST_FILE_BYTES:
            raise ConfigError(f"NCCL_TOPO_FILE {file} is too large to be one")
        return ElementTree.parse(file).getroot()
    except OSError as err:
        raise ConfigError(f"NCCL_TOPO_FILE {file}: {err.strerror}") from err
    except (ElementTree.ParseError, ValueError) as err:
        raise ConfigError(f"NCCL_TOPO_FILE {file} is no XML: {err}") from err


def _normal(bus_id: str, where: Path) -> tuple[int, ...]:
    """Domains are written with four digits or eight, or not at all; bridges of no place as ffff:ff:01.0."""
    match = _BUS_ID.fullmatch(bus_id.strip())
    if not match:
        raise ConfigError(f"{where}: {bus_id!r} is no PCI bus id")
    return tuple(int(part or "0", 16) for part in match.groups())


def _of_mask(mask: str, where: Path) -> set[int]:
    """Words of 32 bits in hexadecimal, the highest first."""
    try:
        bits = int("".join(word.zfill(8) for word in mask.split(",")), 16) if mask.strip() else 0
    except ValueError as err:
        raise ConfigError(f"{where}: {mask!r} is no CPU mask") from err
    return {cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1}


def _of_node(number: str, sysfs: Path) -> set[int]:
    place = sysfs / f"devices/system/node/node{number}/cpulist"
    return _of_list(_text(place) or "", place)


def _of_list(text: str, where: Path) -> set[int]:
    """As `0-15,64-79`."""
    found = set[int]()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError as err:
        raise ConfigError(f"{where}: {text!r} is no list of CPUs") from err
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
