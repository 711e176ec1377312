"""`forebay doctor` on machines that are made here: what is wrong is found, named, and has a fix."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.api.commands.doctor import CHECKS, examine
from forebay.api.doctor import topology
from forebay.api.doctor.disks import check_disks, mount_of, probe
from forebay.api.doctor.finding import Finding, Node
from forebay.api.doctor.gpus import check_gpus
from forebay.api.doctor.host import check_memory
from forebay.api.doctor.network import check_interfaces, check_kernel, chosen
from forebay.api.doctor.sources import check_sources
from forebay.core.config import Settings
from forebay.core.topology import cpus_of_mask, mask_of_cpus


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("FOREBAY_CONFIG", raising=False)
    return Settings.load(home=tmp_path / "home", stager={"capacity": 1000})


def write(root: Path, path: str, text: str) -> None:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text + "\n")


def by_level(findings: list[Finding], level: str) -> str:
    return "\n".join(f"{f.what} | {f.fix}" for f in findings if f.level == level)


def test_this_machine_is_examined_in_full(settings: Settings):
    findings = examine(Node(settings, quick=True))
    assert {"disk", "room", "limits", "clock"} <= {f.check for f in findings}
    assert all(f.fix for f in findings if f.level in ("warn", "fail") and f.check != "speed")


def test_a_check_that_breaks_is_a_finding(settings: Settings):
    def check_nothing(node: Node) -> list[Finding]:
        raise OSError("gone")

    (found,) = examine(Node(settings), (check_nothing,))  # type: ignore[arg-type]
    assert found.check == "nothing" and "gone" in found.what
    assert len(CHECKS) == 8


@pytest.mark.parametrize(
    ("kind", "options", "level", "says"),
    [
        ("tmpfs", "rw", "warn", "takes"),
        ("nfs4", "rw", "fail", "warm.url"),
        ("lustre", "rw", "fail", "warm.url"),
        ("overlay", "rw", "warn", "host directory"),
        ("ext4", "rw,sync", "warn", "without sync"),
        ("ext4", "rw,discard", "note", "fstrim"),
    ],
)
def test_file_systems(settings: Settings, tmp_path: Path, kind: str, options: str, level: str, says: str):
    root = tmp_path / "root"
    write(
        root,
        "proc/self/mountinfo",
        f"1 1 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / {tmp_path} {options} - {kind} x rw",
    )
    node = Node(settings, quick=True, root=root)
    assert mount_of(node.text("proc/self/mountinfo") or "", tmp_path / "home").kind == kind  # type: ignore[union-attr]
    text = "\n".join(f"{f.what} {f.why} {f.fix}" for f in check_disks(node) if f.level == level)
    assert says in text


def test_a_disk_that_is_too_slow_for_the_need(settings: Settings, tmp_path: Path):
    written, read = probe(tmp_path)
    assert written > 0 and read > 0 and list(tmp_path.glob(".forebay-doctor*")) == []
    found = [f for f in check_disks(Node(settings, need_bps=10**15)) if f.check == "speed"]
    assert [f.level for f in found] == ["fail", "ok"], "the need is the hot tier's, not the spool's"


def test_a_capacity_that_the_disk_does_not_have(tmp_path: Path):
    big = Settings.load(home=tmp_path, stager={"capacity": 10**18})
    assert "lower stager.capacity" in by_level(list(check_disks(Node(big, quick=True))), "warn")


def test_memory(settings: Settings, tmp_path: Path):
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    assert "madvise >" in by_level(list(check_memory(Node(settings, root=tmp_path))), "note")


@pytest.mark.parametrize(
    ("name", "spec", "fits"),
    [
        ("eth0", "eth", True),
        ("eth10", "=eth1", False),
        ("eth1", "=eth1", True),
        ("ens5", "^docker,lo", True),
        ("docker0", "^docker,lo", False),
        ("eth0", "^=eth0", False),
        ("mlx5_0", "=mlx5_0:1,mlx5_1", True),
        ("mlx5_2", "mlx5_0,mlx5_1", False),
    ],
)
def test_names_as_nccl_reads_them(name: str, spec: str, fits: bool):
    assert chosen(name, spec) is fits


def test_storage_and_training_on_one_interface(settings: Settings, tmp_path: Path):
    for name in ("lo", "eth0"):
        write(tmp_path, f"sys/class/net/{name}/speed", "25000")
    node = Node(settings, root=tmp_path, env={"NCCL_SOCKET_IFNAME": "ib", "NCCL_IB_HCA": "mlx5_0"})
    failed = by_level(list(check_interfaces(node)), "fail")
    assert "fits no interface" in failed and "fits no adapter" in failed
    # What leaves by loopback is what a local server is reached by.
    server = "http://127.0.0.1:9/x"
    write(tmp_path, "sys/class/net/lo0/speed", "1")
    node = Node(settings, sources=(server,), root=tmp_path, env={"NCCL_SOCKET_IFNAME": "=eth0"})
    assert "storage leaves by lo" in by_level(list(check_interfaces(node)), "ok")


def test_buffers_of_a_fast_card(settings: Settings, tmp_path: Path):
    write(tmp_path, "sys/class/net/eth0/speed", "100000")
    write(tmp_path, "sys/class/net/eth0/mtu", "1500")
    write(tmp_path, "proc/sys/net/core/rmem_max", "212992")
    write(tmp_path, "proc/sys/net/core/wmem_max", str(1 << 27))
    found = list(check_kernel(Node(settings, need_bps=20 * 10**9, root=tmp_path)))
    assert "sysctl net.core.rmem_max=" in by_level(found, "warn") and "wmem" not in by_level(found, "warn")
    assert "160000 are needed" in by_level(found, "fail") and "mtu 9000" in by_level(found, "note")


def test_sources_that_cannot_be_reached(settings: Settings, tmp_path: Path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/x"
        failed = by_level(list(check_sources(Node(settings, sources=(url,)))), "fail")
    assert "nobody answers at 127.0.0.1" in failed
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.tar").write_bytes(b"x")
    found = list(check_sources(Node(settings, sources=(str(tmp_path / "set"),))))
    assert "can be listed" in by_level(found, "ok")
    assert "is not a directory" in by_level(
        list(check_sources(Node(settings, sources=("/no/such",)))), "fail"
    )


def pci(
    root: Path, path: str, pci_class: str, node: int = 0, vendor: str = "0x10de", width: str = "16"
) -> Path:
    """A device below its bridges, and the link by which it is found."""
    place = root / "sys/devices/pci0000:00" / path
    values = {"class": pci_class, "vendor": vendor, "numa_node": str(node), "current_link_width": width,
              "max_link_width": "16", "current_link_speed": "16.0 GT/s PCIe"}  # fmt: skip
    for name, value in values.items():
        write(place, name, value)
    link = root / "sys/bus/pci/devices" / place.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(place)
    return place


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two nodes, a GPU and a card below one bridge on each."""
    for node in (0, 1):
        write(tmp_path, f"sys/devices/system/node/node{node}/cpulist", f"{32 * node}-{32 * node + 31}")
        bridge = f"0000:{node}0:01.0"
        pci(tmp_path, bridge, "0x060400", node, "0x8086")
        pci(tmp_path, f"{bridge}/0000:{node}1:00.0", "0x030200", node)
        card = pci(tmp_path, f"{bridge}/0000:{node}2:00.0", "0x020700", node, "0x15b3")
        (card / "infiniband" / f"mlx5_{node}").mkdir(parents=True)
    return tmp_path


def test_a_written_topology_agrees_with_its_machine(machine: Path, tmp_path: Path):
    text = topology.write(machine / "sys")
    file = tmp_path / "topo.xml"
    file.write_text(text)
    assert list(topology.check_file(file, machine / "sys")) == []
    assert text.count('class="0x030200"') == 2 and 'affinity="ffffffff,00000000"' in text
    assert text.index("0000:00:01.0") < text.index("0000:01:00.0"), "below its bridge"
    assert topology.variables(file, machine / "sys")["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1"


@pytest.mark.parametrize(
    ("old", "new", "says", "wrong"),
    [
        ('numaid="1"', 'numaid="0"', "is near node 1, the file says 0", True),
        ("0000:11:00.0", "0000:77:00.0", "is not in this machine", True),
        ("0000:11:00.0", "0000:77:00.0", "GPU 0000:11:00.0 is missing", True),
        ('link_width="16"', 'link_width="8"', "has 16 lanes, the file says 8", False),
        ("16.0 GT/s PCIe", "32 GT/s", "runs at 16.0 GT/s PCIe", False),
        ("ffffffff,00000000", "0000000f", "the CPUs 32-63, the file says 0-3", True),
        ("<system", "<machine", "not <system>", True),
        ("</cpu>", "", "is no XML", True),
        ("0000:11:00.0", "nonsense", "is no PCI bus id", True),
    ],
)
def test_what_a_topology_file_says_wrong(
    machine: Path, tmp_path: Path, old: str, new: str, says: str, wrong: bool
):
    file = tmp_path / "topo.xml"
    text = topology.write(machine / "sys")
    file.write_text(
        text.replace(old, new).replace("</system>", f"</{new[1:]}>" if new == "<machine" else "</system>")
    )
    found = list(topology.check_file(file, machine / "sys"))
    assert any(says in item.what and item.wrong is wrong for item in found), found


def test_entities_are_refused(tmp_path: Path):
    file = tmp_path / "topo.xml"
    file.write_text('<!DOCTYPE x [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><system>&b;</system>')
    (found,) = topology.check_file(file)
    assert "entities" in found.what


@given(st.sets(st.integers(0, 300)))
def test_masks_come_back(cpus: set[int]):
    assert cpus_of_mask(mask_of_cpus(cpus), "here") == cpus


def test_gpus(machine: Path, settings: Settings, tmp_path: Path):
    slow = machine / "sys/bus/pci/devices/0000:11:00.0"
    (slow / "current_link_width").write_text("4\n")
    file = tmp_path / "topo.xml"
    file.write_text("<system/>")
    found = list(check_gpus(Node(settings, root=machine, env={"NCCL_TOPO_FILE": str(file)})))
    assert "2 GPUs" in by_level(found, "ok") and "runs at x4 of x16" in by_level(found, "warn")
    failed = by_level(found, "fail")
    assert "driver is not loaded" in failed and "GPU 0000:01:00.0 is missing" in failed
    write(machine, "proc/driver/nvidia/version", "NVRM version: 570")
    assert "driver" not in by_level(list(check_gpus(Node(settings, root=machine, env={}))), "fail")
    assert "no GPU" in by_level(list(check_gpus(Node(settings, root=tmp_path / "none", env={}))), "note")
    assert os.path.exists(slow)
