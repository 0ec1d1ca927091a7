"""A host's resources for containers: GPUs, their device files and groups, fabric, memory, limits.

Everything is read below a root directory, so that tests can use recorded trees. Sources: the kernel's proc(5) and
/sys/class/infiniband (Documentation/ABI), CDI's specification folders. What is GPU-specific is in accelerators.py.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buildkit.host.accelerators import ACCELERATORS, KFD, Accelerator, Gpus
from buildkit.host.files import entries, found, read_text

CDI_FOLDERS = ("etc/cdi", "var/run/cdi", "run/cdi")
TOOLKIT = ("usr/bin/nvidia-container-runtime", "usr/bin/nvidia-ctk", "usr/local/bin/nvidia-ctk")
FABRICS = ("infiniband", "roce", "efa", "ethernet")
AMAZON = "0x1d0f"  # PCI vendor of the Elastic Fabric Adapter


@dataclass(frozen=True)
class Machine:
    """Facts of a host; what is absent is None, empty or 0.

    `gpus` has an entry per target. `device_groups` are numbers, as a name may mean another group in a container; None
    without AMD's devices.
    `memlock` is the hard limit in bytes, None for unlimited. `fabric` is one of FABRICS.
    """

    cpus: int
    ram_bytes: int
    shm_bytes: int | None
    gpus: Mapping[str, Gpus]
    render_nodes: tuple[str, ...]
    device_groups: tuple[int, ...] | None
    fabric: str
    hcas: tuple[str, ...]
    rdma_devices: bool
    gdrcopy: bool
    cdi: bool
    container_toolkit: bool
    selinux: bool
    cgroup: int | None
    open_files: int
    memlock: int | None
    uid: int
    gid: int

    @property
    def rootless(self) -> bool:
        return self.uid != 0

    @property
    def accelerator(self) -> Accelerator | None:
        """The kind of the GPUs in this machine; None without GPUs."""
        return next((row for target, row in ACCELERATORS.items() if self.gpus[target].count), None)


def read_machine(root: Path = Path("/")) -> Machine:
    """Never fails: what a host lacks, or does not let us read, is absent in the description."""
    fabric, hcas = read_fabric(root)
    return Machine(
        cpus=os.cpu_count() or 1 if root == Path("/") else read_text(root / "proc/cpuinfo").count("processor\t"),
        ram_bytes=read_ram(root),
        shm_bytes=read_shm(root),
        gpus={target: accelerator.read(root) for target, accelerator in ACCELERATORS.items()},
        render_nodes=tuple(f"/dev/dri/{path.name}" for path in entries(root / "dev/dri") if "render" in path.name),
        device_groups=read_device_groups(root),
        fabric=fabric,
        hcas=hcas,
        rdma_devices=(root / "dev/infiniband").is_dir(),
        gdrcopy=(root / "dev/gdrdrv").exists(),
        cdi=any("nvidia" in read_text(path) for folder in CDI_FOLDERS for path in entries(root / folder)),
        container_toolkit=any((root / path).exists() for path in TOOLKIT),
        selinux=read_text(root / "sys/fs/selinux/enforce") == "1",
        cgroup=read_cgroup(root),
        open_files=read_limit(root, "Max open files") or int(read_text(root / "proc/sys/fs/nr_open") or 2**20),
        memlock=read_limit(root, "Max locked memory"),
        uid=os.getuid(),
        gid=os.getgid(),
    )


def read_ram(root: Path) -> int:
    return int(found(r"^MemTotal:\s+(\d+) kB", read_text(root / "proc/meminfo")) or 0) * 1024


def read_shm(root: Path) -> int | None:
    try:
        state = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return state.f_blocks * state.f_frsize


def read_limit(root: Path, name: str) -> int | None:
    """The hard limit of this process, inherited by what it starts. None for unlimited."""
    hard = found(rf"^{name}\s+\S+\s+(\S+)", read_text(root / "proc/self/limits"))
    return None if hard in (None, "unlimited") else int(hard or 0)


def read_cgroup(root: Path) -> int | None:
    if (root / "sys/fs/cgroup/cgroup.controllers").exists():
        return 2
    return 1 if (root / "sys/fs/cgroup/memory").is_dir() else None


def read_device_groups(root: Path) -> tuple[int, ...] | None:
    """The groups that own the device files of AMD's GPUs. Numbers of another machine would say nothing about them."""
    kfd = root / KFD.lstrip("/")
    if not kfd.exists():
        return None
    devices = [kfd, *(path for path in entries(root / "dev/dri") if path.name != "by-path")]
    return tuple(sorted({path.stat().st_gid for path in devices if path.exists()} - {0}))


def read_fabric(root: Path) -> tuple[str, tuple[str, ...]]:
    """The fastest kind of the active ports, and the adapters that have one."""
    kinds: dict[str, list[str]] = {}
    for hca in entries(root / "sys/class/infiniband"):
        if read_text(hca / "device/vendor") == AMAZON:
            kinds.setdefault("efa", []).append(hca.name)
            continue
        for port in entries(hca / "ports"):
            if "ACTIVE" in read_text(port / "state"):
                kind = "infiniband" if read_text(port / "link_layer") == "InfiniBand" else "roce"
                kinds.setdefault(kind, []).append(hca.name)
    fabric = next((kind for kind in ("infiniband", "efa", "roce") if kind in kinds), "ethernet")
    return fabric, tuple(dict.fromkeys(kinds.get(fabric, ())))
