"""Recorded hosts: device trees in the kernel's layout, a few lines each.

Layouts: https://docs.kernel.org/admin-guide/abi-stable-files.html (sysfs-class-infiniband), and for the machines
https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html,
https://rocm.docs.amd.com/en/latest/how-to/gpu-cluster-networking/index.html,
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html,
https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/ndh100v5-series
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MELLANOX, BROADCOM, AMAZON = "0x15b3", "0x14e4", "0x1d0f"


@dataclass(frozen=True)
class HostTree:
    """Writes files below `root` as the kernel shows them."""

    root: Path

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")

    def image(self, **manifest: Any) -> None:
        """Write the manifest of the image that runs there."""
        self.write("etc/slipway/image.json", json.dumps({"pins": {}, "env": [], **manifest}))

    def link(self, name: str, target: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.root / target, path.parent))

    def device(self, pci: str, vendor: str, device: str) -> str:
        """A PCI device, `pci0000:15/0000:15:01.0/0000:18:00.0`; returns its folder."""
        folder = f"sys/devices/{pci}"
        address = pci.rpartition("/")[2]
        self.write(f"{folder}/vendor", vendor)
        self.write(f"{folder}/device", device)
        self.write(f"{folder}/numa_node", "0")
        self.write(f"{folder}/uevent", f"PCI_SLOT_NAME={address}")
        self.link(f"sys/bus/pci/devices/{address}", folder)
        return folder

    def adapter(
        self,
        name: str,
        pci: str,
        netdev: str = "",
        *,
        layer: str = "InfiniBand",
        rate: str = "400 Gb/sec (4X NDR)",
        state: str = "4: ACTIVE",
        vendor: str = MELLANOX,
        device: str = "0x1021",
        roce: tuple[str, ...] = (),
        mtu: int = 4092,
    ) -> None:
        """An RDMA adapter with one port. `roce` lists its GID types; v2 GIDs after the first have IPv4 addresses."""
        folder = self.device(pci, vendor, device)
        self.link(f"{folder}/infiniband/{name}/device", folder)
        self.link(f"sys/class/infiniband/{name}", f"{folder}/infiniband/{name}")
        port = f"{folder}/infiniband/{name}/ports/1"
        self.write(f"{port}/state", state)
        self.write(f"{port}/phys_state", "5: LinkUp" if "ACTIVE" in state else "3: Disabled")
        self.write(f"{port}/link_layer", layer)
        self.write(f"{port}/rate", rate)
        if netdev:
            self.netdev(netdev, folder, mtu)
        for index, kind in enumerate(roce):
            mapped = index > 1
            self.write(f"{port}/gid_attrs/types/{index}", kind)
            self.write(f"{port}/gid_attrs/ndevs/{index}", netdev)
            gid = "0000:0000:0000:0000:0000:ffff:0a00:0001" if mapped else "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
            self.write(f"{port}/gids/{index}", gid)

    def netdev(self, name: str, folder: str, mtu: int = 1500) -> None:
        self.write(f"{folder}/net/{name}/mtu", str(mtu))
        self.write(f"{folder}/net/{name}/operstate", "up")
        self.write(f"{folder}/net/{name}/dev_port", "0")
        self.link(f"sys/class/net/{name}", f"{folder}/net/{name}")

    def default_route(self, netdev: str) -> None:
        if not (self.root / "sys/class/net" / netdev).exists():
            self.netdev(netdev, self.device("pci0000:00/0000:00:1f.6", "0x8086", "0x1563"))
        header = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
        self.write("proc/net/route", f"{header}\n{netdev}\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0")

    def nvidia_gpu(self, pci: str, model: str = "NVIDIA H100 80GB HBM3") -> None:
        self.device(pci, "0x10de", "0x2330")
        address = pci.rpartition("/")[2]
        self.write(f"proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t {model}\nIRQ:   \t\t 18")

    def amd_gpu(self, pci: str, node: int, target: int = 90402) -> None:
        self.device(pci, "0x1002", "0x74a1")
        _, bus, slot = pci.rpartition("/")[2].split(":")
        location = (int(bus, 16) << 8) + (int(slot.partition(".")[0], 16) << 3)
        folder = f"sys/class/kfd/kfd/topology/nodes/{node}"
        self.write(f"{folder}/gpu_id", str(1000 + node))
        self.write(
            f"{folder}/properties", f"vendor_id 4098\nlocation_id {location}\ndomain 0\ngfx_target_version {target}"
        )


DGX_RAILS = {"0": "18", "3": "40", "4": "4f", "5": "5e", "6": "9a", "9": "c0", "10": "ce", "11": "dc"}
DGX_GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
ROCE = ("IB/RoCE v1", "RoCE v2", "IB/RoCE v1", "RoCE v2")


def dgx_h100(root: Path) -> HostTree:
    """Eight ConnectX-7 adapters, each next to a GPU, and two for storage, all InfiniBand; Ethernet for management."""
    tree = HostTree(root)
    for (number, bus), gpu in zip(DGX_RAILS.items(), DGX_GPUS, strict=True):
        above = f"pci0000:{int(bus, 16) - 3:02x}/0000:{int(bus, 16) - 3:02x}:01.0/0000:{int(bus, 16) - 2:02x}:00.0"
        tree.adapter(
            f"mlx5_{number}", f"{above}/0000:{int(bus, 16) - 1:02x}:00.0/0000:{bus}:00.0", f"ibp{int(bus, 16)}s0"
        )
        tree.nvidia_gpu(f"{above}/0000:{int(bus, 16) - 1:02x}:01.0/0000:{gpu}:00.0")
    for number, bus in {"1": "29", "7": "aa"}.items():
        tree.adapter(
            f"mlx5_{number}",
            f"pci0000:{int(bus, 16) - 1:02x}/0000:{int(bus, 16) - 1:02x}:01.0/0000:{bus}:00.0",
            f"ib{number}",
        )
    for number in ("2", "8"):
        tree.adapter(
            f"mlx5_{number}",
            f"pci0000:7{number}/0000:7{number}:01.0/0000:{number}2:00.1",
            state="1: DOWN",
            rate="10 Gb/sec (4X SDR)",
        )
    tree.default_route("eno3")
    return tree


def mi300x(root: Path, vendor: str = "mlx5") -> HostTree:
    """Eight RoCE adapters, each next to a GPU, and two front-end adapters, one with the default route."""
    tree = HostTree(root)
    skipped = {6, 7}
    names = [number for number in range(10) if number not in skipped]
    kind = {"mlx5": (MELLANOX, "0x1021", "mlx5_{}"), "bnxt": (BROADCOM, "0x1760", "bnxt_re{}")}[vendor]
    for index, number in enumerate(names):
        bus = 0x10 + index * 0x10
        above = f"pci0000:{bus:02x}/0000:{bus:02x}:01.1/0000:{bus + 1:02x}:00.0"
        tree.adapter(
            kind[2].format(number), f"{above}/0000:{bus + 2:02x}:00.0/0000:{bus + 4:02x}:00.0", f"rail{index}",
            layer="Ethernet", vendor=kind[0], device=kind[1], roce=ROCE, mtu=9000,
        )  # fmt: skip
        tree.amd_gpu(f"{above}/0000:{bus + 2:02x}:01.0/0000:{bus + 5:02x}:00.0", node=index + 2)
    tree.write("sys/class/kfd/kfd/topology/nodes/0/gpu_id", "0")
    for number in skipped:
        tree.adapter(
            kind[2].format(number), f"pci0000:a{number}/0000:a{number}:01.0/0000:b{number}:00.0", f"front{number}",
            layer="Ethernet", vendor=kind[0], device=kind[1], roce=ROCE, rate="200 Gb/sec (4X HDR)",
        )  # fmt: skip
    tree.default_route("front6")
    return tree


def aws_p5(root: Path) -> HostTree:
    """32 EFA devices, four for each of eight GPUs."""
    tree = HostTree(root)
    for gpu in range(8):
        bus = 0x40 + gpu * 0x10
        for card in range(4):
            tree.adapter(
                f"rdmap{bus + card}s0", f"pci0000:{bus:02x}/0000:{bus:02x}:0{card}.0/0000:{bus + card:02x}:1b.0",
                layer="Unspecified", vendor=AMAZON, device="0xefa2", rate="100 Gb/sec (4X EDR)",
            )  # fmt: skip
        tree.nvidia_gpu(f"pci0000:{bus:02x}/0000:{bus:02x}:05.0/0000:{bus + 5:02x}:00.0")
    tree.default_route("ens32")
    return tree


def azure_nd(root: Path) -> HostTree:
    """A virtual machine with InfiniBand virtual functions, and one Ethernet function of the cloud's network."""
    tree = HostTree(root)
    for number in range(8):
        pci = f"LNXSYSTM:00/VMBUS:00/guid-{number}/pci010{number}:00/010{number}:00:00.0"
        tree.adapter(f"mlx5_ib{number}", pci, f"ib{number}", device="0x101e")
        tree.nvidia_gpu(f"LNXSYSTM:00/VMBUS:00/gpu-{number}/pci000{number}:00/000{number}:00:00.0")
    tree.adapter(
        "mlx5_an0", "LNXSYSTM:00/VMBUS:00/an/pci4f5a:00/4f5a:00:02.0", "eth1",
        layer="Ethernet", device="0x1016", roce=ROCE, rate="100 Gb/sec (4X EDR)",
    )  # fmt: skip
    tree.default_route("eth0")
    return tree


def sriov_pod(root: Path) -> HostTree:
    """A pod with eight RoCE virtual functions, each next to a GPU; its default route leads over the pod network.

    The devices of the host and of other pods are visible too, their network interfaces are not.
    """
    tree = HostTree(root)
    for index in range(8):
        bus = 0x10 + index * 0x10
        above = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0/0000:{bus + 2:02x}:00.0"
        for function, netdev in ((0, ""), (2, f"net{index + 1}"), (3, "")):
            tree.adapter(
                f"mlx5_{index * 3 + function}" if function else f"mlx5_{index * 3 + 1}",
                f"{above}/0000:{bus + 3:02x}:00.{function}", netdev,
                layer="Ethernet", roce=ROCE if netdev else (), device="0x101e" if function else "0x1021", mtu=9000,
            )  # fmt: skip
        tree.nvidia_gpu(f"{above}/0000:{bus + 4:02x}:00.0")
    tree.default_route("eth0")
    return tree


def flat_vm(root: Path, adapters: int = 8, gpus: int = 8) -> HostTree:
    """A virtual machine that hides which adapter is beside which GPU: everything is on one bus.

    The virtual function of the cloud's own network is part of the interface with the default route.
    """
    tree = HostTree(root)
    for index in range(gpus):
        tree.nvidia_gpu(f"pci0000:00/0000:00:{index:02x}.0", "NVIDIA B300 SXM6 AC")
    for index in range(adapters):
        tree.adapter(
            f"rocep{index}", f"pci0000:00/0000:00:{0x10 + index:02x}.0", f"eth{index + 2}",
            layer="Ethernet", roce=ROCE, device="0x101e",
        )  # fmt: skip
    tree.adapter(
        "mlx5_an0", "pci0000:00/0000:00:1e.0", "eth1", layer="Ethernet", roce=ROCE, device="0x1016", rate="400 Gb/sec"
    )
    tree.default_route("eth0")
    tree.write("sys/class/net/eth1/master/ifindex", "2")
    return tree


def cloud_vm(root: Path) -> HostTree:
    """A small virtual machine whose only RDMA device is a virtual function of the accelerated network."""
    tree = HostTree(root)
    tree.adapter(
        "mlx5_0", "pci0000:00/0000:00:02.0", "eth1", layer="Ethernet", device="0x1016", roce=ROCE, rate="50 Gb/sec"
    )
    tree.default_route("eth0")
    return tree


def no_fabric(root: Path) -> HostTree:
    tree = HostTree(root)
    tree.default_route("eno1")
    return tree
