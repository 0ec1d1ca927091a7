"""What a host offers to containers: GPUs, their device files and groups, fabric, memory, limits.

Everything is read below a root directory, so that a recorded tree stands for a host. Sources: the kernel's proc(5),
/sys/class/infiniband and /sys/class/kfd (Documentation/ABI), NVIDIA's /proc/driver/nvidia, CDI's specification folders.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CDI_FOLDERS = ("etc/cdi", "var/run/cdi", "run/cdi")
TOOLKIT = ("usr/bin/nvidia-container-runtime", "usr/bin/nvidia-ctk", "usr/local/bin/nvidia-ctk")
FABRICS = ("infiniband", "roce", "efa", "ethernet")
AMAZON = "0x1d0f"  # PCI vendor of the Elastic Fabric Adapter


@dataclass(frozen=True)
class Machine:
    """`device_groups` are numbers, as a group's name may mean another one in a container; `memlock` is the hard limit
    in bytes, None for unlimited; `fabric` is one of FABRICS; what is not there is None, empty or 0."""

    cpus: int
    ram_bytes: int
    shm_bytes: int | None
    nvidia_driver: str | None
    nvidia_gpus: int
    amd_driver: str | None
    amd_architectures: tuple[str, ...]
    render_nodes: tuple[str, ...]
    device_groups: tuple[int, ...]
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

    def gpus(self, target: str) -> int:
        return {"cuda": self.nvidia_gpus, "rocm": len(self.amd_architectures)}.get(target, 0)


def read_machine(root: Path = Path("/")) -> Machine:
    """Never fails: what a host lacks, or does not let us read, is absent in the description."""
    fabric, hcas = read_fabric(root)
    return Machine(
        cpus=os.cpu_count() or 1 if root == Path("/") else read_text(root / "proc/cpuinfo").count("processor\t"),
        ram_bytes=read_ram(root),
        shm_bytes=read_shm(root),
        nvidia_driver=found(r"(\d+\.\d+(?:\.\d+)?)", read_text(root / "proc/driver/nvidia/version")),
        nvidia_gpus=len(list(entries(root / "proc/driver/nvidia/gpus"))),
        amd_driver=read_text(root / "sys/module/amdgpu/version") or None,
        amd_architectures=tuple(amd_architectures(root)),
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


def entries(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.iterdir())
    except OSError:
        return


def read_text(path: Path) -> str:
    """Empty where there is no such file, or none for us: an unset GID slot, for one, answers with EINVAL."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else None


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


def amd_architectures(root: Path) -> Iterator[str]:
    """One name for each GPU of the kernel's compute topology, whose CPU nodes have no `gpu_id`."""
    for node in entries(root / "sys/class/kfd/kfd/topology/nodes"):
        if read_text(node / "gpu_id") in ("", "0"):
            continue
        number = int(found(r"^gfx_target_version (\d+)", read_text(node / "properties")) or 0)
        yield f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"


def read_device_groups(root: Path) -> tuple[int, ...]:
    """The groups that own the GPU's device files; where there are none, those of the names that own them by custom."""
    devices = [root / "dev/kfd", *(path for path in entries(root / "dev/dri") if path.name != "by-path")]
    owners = [path.stat().st_gid for path in devices if path.exists()]
    if not owners:
        lines = [line.split(":") for line in read_text(root / "etc/group").splitlines()]
        owners = [int(line[2]) for line in lines if len(line) > 2 and line[0] in ("render", "video")]
    return tuple(sorted({gid for gid in owners if gid != 0}))


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
