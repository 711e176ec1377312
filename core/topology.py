"""PCI devices, NUMA nodes and CPUs, as NCCL's topology files and sysfs tell of them.

A file is `<system>` of `<cpu numaid affinity>` of nested `<pci busid>`; NCCL_TOPO_FILE names it
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from forebay.core.errors import ConfigError

SYSFS = Path("/sys")
_LARGEST_FILE_BYTES = 16 << 20
_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)
_MOST_CPUS = 1 << 16

BusId = tuple[int, ...]


def read_system(file: Path) -> ElementTree.Element:
    """Raises ConfigError for what cannot be read, is too large, or is no XML."""
    try:
        if file.stat().st_size > _LARGEST_FILE_BYTES:
            raise ConfigError(f"NCCL_TOPO_FILE {file} is too large to be one")
        text = file.read_bytes()
    except OSError as err:
        raise ConfigError(f"NCCL_TOPO_FILE {file}: {err.strerror}") from err
    if b"<!ENTITY" in text:
        # A few lines of them can stand for gigabytes.
        raise ConfigError(f"NCCL_TOPO_FILE {file} declares entities, which a topology never needs")
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as err:
        raise ConfigError(f"NCCL_TOPO_FILE {file} is no XML: {err}") from err


def bus_id(text: str, where: object) -> BusId:
    """Domains are written with four digits or eight, or not at all; bridges of no place as ffff:ff:01.0."""
    match = _BUS_ID.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"{where}: {text!r} is no PCI bus id")
    return tuple(int(part or "0", 16) for part in match.groups())


def cpus_of_mask(mask: str, where: object) -> set[int]:
    """Words of 32 bits in hexadecimal, the highest first."""
    try:
        bits = int("".join(word.zfill(8) for word in mask.split(",")), 16) if mask.strip() else 0
    except ValueError as err:
        raise ConfigError(f"{where}: {mask!r} is no CPU mask") from err
    if bits.bit_length() > _MOST_CPUS:
        raise ConfigError(f"{where}: a CPU mask of {bits.bit_length()} bits")
    return {cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1}


def mask_of_cpus(cpus: set[int]) -> str:
    """As NCCL writes it: words of eight digits, the highest first."""
    bits = sum(1 << cpu for cpu in cpus)
    words: list[str] = []
    while bits or not words:
        words.append(f"{bits & 0xFFFFFFFF:08x}")
        bits >>= 32
    return ",".join(reversed(words))


def cpus_of_list(text: str, where: object) -> set[int]:
    """As `0-15,64-79`."""
    found = set[int]()
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            if int(last or first) >= _MOST_CPUS:
                raise ValueError(part)
            found.update(range(int(first), int(last or first) + 1))
    except ValueError as err:
        raise ConfigError(f"{where}: {text!r} is no list of CPUs") from err
    return found


def cpus_of_node(number: str, sysfs: Path = SYSFS) -> set[int]:
    place = sysfs / f"devices/system/node/node{number}/cpulist"
    return cpus_of_list(text_of(place) or "", place)


def text_of(path: Path) -> str | None:
    """None where there is nothing to read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
