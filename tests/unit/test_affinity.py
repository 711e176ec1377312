"""CPUs near a GPU: from topology files as clouds ship them, from sysfs, and from nothing that makes sense."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.errors import ConfigError
from forebay.loaders.affinity import near_by_sysfs, near_by_topology, usable
from forebay.loaders.batch import SampleReader
from forebay.loaders.pool import BatchPool
from forebay.loaders.workers import InThreads

TOPOLOGY = """<system version="1">
  <cpu numaid="0" affinity="00000000,0000ffff" arch="x86_64" vendor="GenuineIntel">
    <pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">
      <pci busid="0001:00:00.0" class="0x030200"/>
    </pci>
  </cpu>
  <cpu numaid="1" affinity="00000003,00000000" arch="x86_64">
    <pci busid="00000000:0F:00.0" class="0x030200"/>
  </cpu>
  <cpu numaid="2"><pci busid="0003:00:00.0" class="0x030200"/></cpu>
</system>
"""


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    file = tmp_path / "topo.xml"
    file.write_text(TOPOLOGY)
    return file


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    device = tmp_path / "sys/bus/pci/devices/0000:0f:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (device / "local_cpulist").write_text("0-1,8-9\n")
    node = tmp_path / "sys/devices/system/node/node2"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("4-6\n")
    return tmp_path / "sys"


def test_nccl_topology(topology: Path, sysfs: Path):
    assert near_by_topology("0001:00:00.0", topology) == set(range(16))
    assert near_by_topology("0000:0f:00.0", topology) == {32, 33}, "domains of eight digits, capitals"
    assert near_by_topology("0003:00:00.0", topology, sysfs) == {4, 5, 6}, "no mask: the node's own list"


def test_sysfs(sysfs: Path):
    assert near_by_sysfs("0000:0f:00.0", sysfs) == {0, 1, 8, 9}
    assert near_by_sysfs("0000:ff:00.0", sysfs) == set()
    (sysfs / "bus/pci/devices/0000:0f:00.0/numa_node").write_text("-1\n")
    assert near_by_sysfs("0000:0f:00.0", sysfs) == set(), "a machine of one node"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<system", "is no XML"),
        ("<system/>", "has no PCI device"),
        ('<system><cpu affinity="xyz"><pci busid="0000:0f:00.0"/></cpu></system>', "is no CPU mask"),
        ('<system><cpu><pci busid="here"/></cpu></system>', "is no PCI bus id"),
        (None, "No such file"),
    ],
)
def test_what_makes_no_sense_is_said_and_nothing_is_placed(
    tmp_path: Path, text: str | None, said: str, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "topo.xml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        near_by_topology("0000:0f:00.0", file)
    caplog.set_level(logging.WARNING)
    assert usable("0000:0f:00.0", file) == frozenset()
    assert "not placed near the GPU" in caplog.text


@given(st.binary(max_size=300))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes):
    file = tmp_path_factory.mktemp("topo") / "x.xml"
    file.write_bytes(data)
    with pytest.raises(ConfigError):
        near_by_topology("0000:0f:00.0", file)


def test_cpus_that_this_process_may_not_use_are_left_out(sysfs: Path, caplog: pytest.LogCaptureFixture):
    mine = os.sched_getaffinity(0)
    device = sysfs / "bus/pci/devices/0000:0f:00.0"
    (device / "local_cpulist").write_text(f"{min(mine)},4000-4001")
    assert usable("0000:0f:00.0", None, sysfs) == {min(mine)}
    (device / "local_cpulist").write_text("4000-4001")
    assert usable("0000:0f:00.0", None, sysfs) == frozenset()
    assert "may use none of its CPUs" in caplog.text


def test_a_loaders_threads_stay_there_and_no_other_thread_is_moved():
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    maker = InThreads(SampleReader([], "raise"), None, BatchPool(0), one)
    seen: list[set[int]] = []

    def thread() -> None:
        maker.enter_thread()
        seen.append(os.sched_getaffinity(0))

    other = threading.Thread(target=thread)
    other.start()
    other.join()
    assert seen == [one] and os.sched_getaffinity(0) == before
