"""Recorded hosts: directory trees with the files that `read_machine` reads on a real host."""

import os
from dataclasses import dataclass, field
from pathlib import Path

DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@dgx)\nGCC version: 13.3\n"
)
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 1048576              files
Max locked memory         {memlock:<20} {memlock:<20} bytes
"""


@dataclass
class Host:
    """`hcas` maps an adapter to its link layer, or to `efa`; `down` lists adapters without a link."""

    ram_gib: int = 64
    nvidia: int = 0
    amd: int = 0
    gfx_target: int = 90402
    hcas: dict[str, str] = field(default_factory=dict)
    down: tuple[str, ...] = ()
    memlock: str = "unlimited"
    toolkit: bool = False
    cdi: bool = False
    selinux: bool = False
    cgroup: int = 2

    def write(self, root: Path) -> Path:
        files = {
            "proc/meminfo": f"MemTotal:       {self.ram_gib * 2**20} kB\nMemFree:  1 kB\n",
            "proc/cpuinfo": "processor\t: 0\n\nprocessor\t: 1\n",
            "proc/sys/fs/nr_open": "1048576\n",
            "proc/self/limits": LIMITS.format(memlock=self.memlock),
            "sys/fs/selinux/enforce": "1" if self.selinux else "0",
            "sys/fs/cgroup/cgroup.controllers" if self.cgroup == 2 else "sys/fs/cgroup/memory/tasks": "cpu memory\n",
        }
        if self.nvidia:
            files["proc/driver/nvidia/version"] = DRIVER
        for index in range(self.nvidia):
            files[f"proc/driver/nvidia/gpus/0000:{index:02x}:00.0/information"] = "Model: NVIDIA H100 80GB HBM3\n"
        if self.toolkit:
            files["usr/bin/nvidia-container-runtime"] = ""
        if self.cdi:
            files["etc/cdi/nvidia.yaml"] = "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\n"
        files |= self.amd_files() | self.fabric_files()
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (root / "dev/shm").mkdir(parents=True, exist_ok=True)
        return root

    def amd_files(self) -> dict[str, str]:
        if not self.amd:
            return {}
        nodes = "sys/class/kfd/kfd/topology/nodes"
        files = {"dev/kfd": "", "sys/module/amdgpu/version": "6.12.12\n"}
        files |= {f"{nodes}/0/gpu_id": "0\n", f"{nodes}/0/properties": "cpu_cores_count 96\nvendor_id 0\n"}
        for index in range(self.amd):
            files[f"{nodes}/{index + 1}/gpu_id"] = f"{51110 + index}\n"
            files[f"{nodes}/{index + 1}/properties"] = f"vendor_id 4098\ngfx_target_version {self.gfx_target}\n"
            files[f"dev/dri/card{index}"] = files[f"dev/dri/renderD{128 + index}"] = ""
        return files

    def fabric_files(self) -> dict[str, str]:
        files = {}
        for index, (name, layer) in enumerate(self.hcas.items()):
            folder = f"sys/class/infiniband/{name}"
            files[f"dev/infiniband/uverbs{index}"] = ""
            files[f"{folder}/device/vendor"] = "0x1d0f\n" if layer == "efa" else "0x15b3\n"
            files[f"{folder}/ports/1/state"] = "1: DOWN\n" if name in self.down else "4: ACTIVE\n"
            files[f"{folder}/ports/1/link_layer"] = f"{layer}\n"
        return files


def own_devices(root: Path, gid: int) -> bool:
    """Gives the GPU's device files to a group, as udev does; only root can."""
    if os.getuid() != 0:
        return False
    for path in [root / "dev/kfd", *(root / "dev/dri").iterdir()]:
        os.chown(path, 0, gid)
    return True


BARE = Host()
DGX = Host(
    ram_gib=2048, nvidia=8, toolkit=True, cdi=True,
    hcas={**{f"mlx5_{index}": "InfiniBand" for index in range(8)}, "mlx5_8": "Ethernet"},
)  # fmt: skip
MI300X = Host(ram_gib=2304, amd=8, hcas={f"bnxt_re{index}": "Ethernet" for index in range(8)}, memlock="8388608")
P5 = Host(ram_gib=2048, nvidia=8, toolkit=True, hcas={f"rdmap{index}s0": "efa" for index in range(32)})
