"""NCCL's topology file: written from sysfs, or compared with it."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from forebay.core.errors import ConfigError
from forebay.core.topology import (
    SYSFS,
    bus_id,
    cpus_of_mask,
    cpus_of_node,
    mask_of_cpus,
    read_system,
    text_of,
)

_GPU = "0x03"
_NET = "0x02"
_BRIDGE = "0x0604"
_NAME = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class Device(msgspec.Struct, frozen=True):
    """A PCI device. `node` is -1 where the machine does not tell; width 0 where it has no link."""

    bus_id: str
    pci_class: str
    vendor: str
    node: int
    speed: str
    width: int
    most_width: int
    parents: tuple[str, ...]
    net: tuple[str, ...]
    adapters: tuple[str, ...]

    @property
    def is_gpu(self) -> bool:
        return self.pci_class.startswith(_GPU) and self.vendor in ("0x10de", "0x1002")

    @property
    def is_nic(self) -> bool:
        return self.pci_class.startswith(_NET)

    @property
    def narrow(self) -> bool:
        return 0 < self.width < self.most_width


class Disagreement(msgspec.Struct, frozen=True):
    """`wrong`: NCCL would be misled; otherwise only less good than it could be."""

    what: str
    wrong: bool


def devices(sysfs: Path = SYSFS) -> list[Device]:
    """In order of their bus ids."""
    folder = sysfs / "bus/pci/devices"
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    return [_device(place) for place in places if _NAME.fullmatch(place.name)]


def _device(place: Path) -> Device:
    above = [part for part in place.resolve().parts if _NAME.fullmatch(part)]
    return Device(
        bus_id=place.name,
        pci_class=text_of(place / "class") or "",
        vendor=text_of(place / "vendor") or "",
        node=_number(text_of(place / "numa_node"), -1),
        speed=text_of(place / "current_link_speed") or "",
        width=_number(text_of(place / "current_link_width"), 0),
        most_width=_number(text_of(place / "max_link_width"), 0),
        parents=tuple(above[:-1]),
        net=_names(place / "net"),
        adapters=_names(place / "infiniband"),
    )


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text and text.lstrip("-").isdecimal() else otherwise


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(place.name for place in folder.iterdir())) if folder.is_dir() else ()


def write(sysfs: Path = SYSFS) -> str:
    """XML with the GPUs and network cards of this machine, below their bridges, by NUMA node.

    What a virtual machine hides is not in sysfs; then the provider's own file is better.
    """
    known = {device.bus_id: device for device in devices(sysfs)}
    system = ElementTree.Element("system", version="1")
    placed: dict[tuple[int, str], ElementTree.Element] = {}
    for device in known.values():
        if device.is_gpu or device.is_nic:
            node = max(device.node, 0)
            above = placed.get((node, ""))
            if above is None:
                above = placed[node, ""] = _cpu(system, node, sysfs)
            for name in (*device.parents, device.bus_id):
                if (node, name) not in placed:
                    placed[node, name] = _pci(above, name, known.get(name))
                above = placed[node, name]
    ElementTree.indent(system)
    return ElementTree.tostring(system, encoding="unicode") + "\n"


def _cpu(system: ElementTree.Element, node: int, sysfs: Path) -> ElementTree.Element:
    cpus = cpus_of_node(str(node), sysfs)
    return ElementTree.SubElement(
        system, "cpu", numaid=str(node), affinity=mask_of_cpus(cpus), arch=platform.machine()
    )


def _pci(above: ElementTree.Element, name: str, device: Device | None) -> ElementTree.Element:
    attributes = {"busid": name, "class": (device.pci_class if device else "") or "0x060400"}
    if device and device.width:
        attributes |= {"link_speed": device.speed, "link_width": str(device.width)}
    found = ElementTree.SubElement(above, "pci", attributes)
    if device and device.is_nic and device.adapters:
        nic = ElementTree.SubElement(found, "nic")
        for adapter in device.adapters:
            ElementTree.SubElement(nic, "net", name=adapter)
    return found


def check_file(file: Path, sysfs: Path = SYSFS) -> Iterator[Disagreement]:
    """Where a file and this machine differ. What the file cannot be read for is one disagreement."""
    try:
        yield from _compare(file, sysfs)
    except ConfigError as err:
        yield Disagreement(err.message, True)


def _compare(file: Path, sysfs: Path) -> Iterator[Disagreement]:
    system = read_system(file)
    if system.tag != "system":
        yield Disagreement(f"its root is <{system.tag}>, not <system>", True)
        return
    real = {bus_id(device.bus_id, sysfs): device for device in devices(sysfs)}
    named = set()
    for cpu in system.iter("cpu"):
        number = _number(cpu.get("numaid"), -1)
        yield from _compare_cpus(cpu, number, file, sysfs)
        for pci in cpu.iter("pci"):
            place = bus_id(pci.get("busid", ""), file)
            named.add(place)
            if device := real.get(place):
                yield from _compare_device(pci, device, number)
            elif not pci.get("class", "").startswith(_BRIDGE):
                # Bridges of a provider's file stand for what a virtual machine hides.
                yield Disagreement(f"PCI device {pci.get('busid')} is not in this machine", True)
    for place, device in real.items():
        if device.is_gpu and place not in named:
            yield Disagreement(f"GPU {device.bus_id} is missing", True)
        elif device.adapters and place not in named:
            yield Disagreement(f"adapter {device.adapters[0]} at {device.bus_id} is missing", False)


def _compare_cpus(cpu: ElementTree.Element, number: int, file: Path, sysfs: Path) -> Iterator[Disagreement]:
    said, real = cpus_of_mask(cpu.get("affinity", ""), file), cpus_of_node(str(number), sysfs)
    if said and real and said != real:
        yield Disagreement(f"node {number} has the CPUs {_brief(real)}, the file says {_brief(said)}", True)


def _compare_device(pci: ElementTree.Element, device: Device, number: int) -> Iterator[Disagreement]:
    if device.node >= 0 and number >= 0 and device.node != number:
        yield Disagreement(f"{device.bus_id} is near node {device.node}, the file says {number}", True)
    width = _number(pci.get("link_width"), 0)
    if width and device.width and width != device.width:
        yield Disagreement(f"{device.bus_id} has {device.width} lanes, the file says {width}", False)
    speed = pci.get("link_speed", "")
    if speed and device.speed and _gigatransfers(speed) != _gigatransfers(device.speed):
        yield Disagreement(f"{device.bus_id} runs at {device.speed}, the file says {speed}", False)


def _gigatransfers(text: str) -> float:
    """`16 GT/s` and `16.0 GT/s PCIe` are one."""
    found = re.match(r"[\d.]+", text.strip())
    return float(found[0]) if found else 0.0


def _brief(cpus: set[int]) -> str:
    """As ranges."""
    ordered, parts = sorted(cpus), []
    start = previous = ordered[0]
    for cpu in [*ordered[1:], -1]:
        if cpu != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = cpu
        previous = cpu
    return ",".join(parts)


def variables(file: Path, sysfs: Path = SYSFS) -> dict[str, str]:
    """What belongs into the environment of a job beside the file."""
    adapters = [name for device in devices(sysfs) for name in device.adapters]
    found = {"NCCL_TOPO_FILE": str(file)}
    if adapters:
        found["NCCL_IB_HCA"] = "=" + ",".join(adapters)
    return found
