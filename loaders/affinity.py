"""Which CPUs are near this rank's GPU: where its loader's threads and its page-locked memory belong.

From NCCL's topology file where NCCL_TOPO_FILE names one (`<system>` of `<cpu numaid affinity>` of `<pci
busid>`; https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), else from sysfs. Memory follows
the thread that first writes to it. Whatever is missing or makes no sense is said, and nothing is placed.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from forebay.core.errors import ConfigError
from forebay.core.topology import (
    SYSFS,
    bus_id,
    cpus_of_list,
    cpus_of_mask,
    cpus_of_node,
    read_system,
    text_of,
)
from forebay.loaders.pool import cuda_runs

log = logging.getLogger("forebay.loaders")


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


def usable(device_id: str, topology: Path | None, sysfs: Path = SYSFS) -> frozenset[int]:
    """CPUs near a PCI device, within this process's own. What is wrong is logged, not raised."""
    try:
        near = near_by_topology(device_id, topology, sysfs) if topology else near_by_sysfs(device_id, sysfs)
    except ConfigError as err:
        log.warning("threads are not placed near the GPU: %s", err)
        return frozenset()
    mine = frozenset(near & os.sched_getaffinity(0))
    if near and not mine:
        log.warning("threads are not placed near GPU %s: this process may use none of its CPUs", device_id)
    return mine


def near_by_topology(device_id: str, file: Path, sysfs: Path = SYSFS) -> set[int]:
    """Raises ConfigError for a file that cannot be read, or that does not know the device."""
    wanted = bus_id(device_id, file)
    for cpu in read_system(file).iter("cpu"):
        if any(bus_id(pci.get("busid", ""), file) == wanted for pci in cpu.iter("pci")):
            # Virtual machines leave the mask out, or empty.
            return cpus_of_mask(cpu.get("affinity", ""), file) or cpus_of_node(cpu.get("numaid", "-1"), sysfs)
    raise ConfigError(f"NCCL_TOPO_FILE {file} has no PCI device {device_id}")


def near_by_sysfs(device_id: str, sysfs: Path = SYSFS) -> set[int]:
    """Nothing where the machine has one node, or does not tell."""
    device = sysfs / "bus/pci/devices" / device_id
    if (text_of(device / "numa_node") or "-1") == "-1":
        return set()
    return cpus_of_list(text_of(device / "local_cpulist") or "", device)
