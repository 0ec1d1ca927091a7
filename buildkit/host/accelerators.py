"""One row per accelerator: how a host shows its GPUs, which container flags they need, which libraries drive them.

To add one, write a row in `ACCELERATORS` under the name of its target in `images/matrix.toml`. Sources: NVIDIA's
/proc/driver/nvidia, the kernel's /sys/class/kfd (Documentation/ABI), NVIDIA's and AMD's guides for containers.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from buildkit.host.files import entries, found, read_text

STACK = 2**26  # bytes, as in NVIDIA's and AMD's recipes
TRACE = "SYS_PTRACE"
KFD = "/dev/kfd"


@dataclass(frozen=True)
class Flag:
    """One option of `docker run`; `value` is empty for a switch.

    With `shell`, the value is a shell's expression, for what only the machine knows on which the command will run.
    """

    name: str
    value: str
    reason: str
    shell: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        return (f"--{self.name}", self.value) if self.value else (f"--{self.name}",)

    @property
    def text(self) -> str:
        """The option as a shell reads it."""
        return f'--{self.name} "{self.value}"' if self.shell else shlex.join(self.words)


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one kind in a host. `architectures` has one name per GPU where the kernel tells it.

    `models` are the distinct GPUs in order, as compilers tell them apart: `NVIDIA H200`, `gfx942`.
    """

    count: int = 0
    driver: str | None = None
    architectures: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class Devices:
    """GPUs to hand into a container: their numbers, None for all; the DRM render nodes; the groups that own them.

    The groups are None if the GPUs are in another machine.
    """

    chosen: tuple[int, ...] | None
    render_nodes: tuple[str, ...]
    groups: tuple[int, ...] | None


def no_gpus(_root: Path) -> Gpus:
    return Gpus()


def no_flags(_devices: Devices) -> list[Flag]:
    return []


@dataclass(frozen=True)
class Accelerator:
    """A target's hardware. The defaults describe a target without GPUs.

    `target` is its name in images/matrix.toml, `vendor` is empty without GPUs. `runtime` is the component whose version
    an environment table can ask for, `architecture` a pattern of GPU names. `collectives` and `runtime_library` name
    shared libraries (`nccl` is libnccl.so); `oldest_driver` maps the runtime library's major version to a driver.
    """

    target: str
    vendor: str = ""
    read: Callable[[Path], Gpus] = no_gpus
    flags: Callable[[Devices], list[Flag]] = no_flags
    runtime: str = ""
    architecture: str = ""
    collectives: str = ""
    runtime_library: str = ""
    oldest_driver: Mapping[str, str] = field(default_factory=dict)
    resource: str = ""  # Kubernetes' name of one GPU
    apptainer: Flag | None = None
    driver_module: str = ""  # the kernel module, in messages
    container_toolkit: bool = False  # engines need NVIDIA's container toolkit or CDI
    render_nodes: bool = False  # each GPU is a /dev/dri/renderD*, owned by a group
    device_files: tuple[str, ...] = ()  # patterns of the files whose groups a container has to join
    assumed_architecture: str = ""  # of nodes other than this machine
    numa_balancing_hurts: bool = False
    code_runs_on: Callable[[str, str], bool] | None = None  # whether code for one GPU runs on another; None: unknown

    @property
    def has_gpus(self) -> bool:
        return bool(self.vendor)


LIMITS = (
    Flag("ulimit", "memlock=-1", "GPU and network buffers are pinned, without a limit"),
    Flag("ulimit", f"stack={STACK}", "deep recursion in compilers and NCCL's helper threads"),
)


# ---- NVIDIA ----


def read_nvidia(root: Path) -> Gpus:
    driver = found(r"(\d+\.\d+(?:\.\d+)?)", read_text(root / "proc/driver/nvidia/version"))
    files = [read_text(gpu / "information") for gpu in entries(root / "proc/driver/nvidia/gpus")]
    models = {found(r"^Model:\s*(.+?)\s*$", text) or "unknown" for text in files}
    return Gpus(len(files), driver, models=tuple(sorted(models)))


def nvidia_flags(devices: Devices) -> list[Flag]:
    chosen = f'"device={",".join(map(str, devices.chosen))}"' if devices.chosen else "all"
    return [
        Flag("gpus", chosen, "the NVIDIA container toolkit adds devices and the driver's libraries"),
        *LIMITS,
    ]


def same_cuda_major(code: str, device: str) -> bool:
    """Machine code runs on later GPUs of the same major version (CUDA's binary compatibility)."""
    has, wants = int(code.removeprefix("sm_")), int(device.removeprefix("sm_"))
    return has // 10 == wants // 10 and has <= wants


# ---- AMD ----


def read_amd(root: Path) -> Gpus:
    architectures = tuple(amd_architectures(root))
    driver = read_text(root / "sys/module/amdgpu/version") or None
    return Gpus(len(architectures), driver, architectures, tuple(sorted(set(architectures))))


def amd_architectures(root: Path) -> Iterator[str]:
    """One name for each GPU of the kernel's compute topology, whose CPU nodes have no `gpu_id`."""
    for node in entries(root / "sys/class/kfd/kfd/topology/nodes"):
        if read_text(node / "gpu_id") in ("", "0"):
            continue
        number = int(found(r"^gfx_target_version (\d+)", read_text(node / "properties")) or 0)
        yield f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"


def amd_flags(devices: Devices) -> list[Flag]:
    return [
        Flag("device", KFD, "ROCm's compute interface, one for all GPUs"),
        *render_node_flags(devices),
        Flag("cap-add", TRACE, "processes of a node read each other's GPU buffers (IPC handles, CMA)"),
        Flag(
            "security-opt", "seccomp=unconfined", "docker's filter blocks calls that ROCm uses to map and place memory"
        ),
        *LIMITS,
    ]


def render_node_flags(devices: Devices) -> list[Flag]:
    """The GPUs as DRM devices, and the groups that own them."""
    known = dict(enumerate(devices.render_nodes))
    paths = [known.get(index, f"/dev/dri/renderD{128 + index}") for index in devices.chosen or ()] or ["/dev/dri"]
    groups = [
        Flag("group-add", str(gid), "owns the GPU devices here; the image may give the same name another number")
        for gid in devices.groups or ()
    ]
    if devices.groups is None:
        owner = Flag("group-add", f"$(stat -c %g {KFD})", "owns the GPU devices where the container runs", shell=True)
        groups.append(owner)
    return [*(Flag("device", path, "the GPUs' render nodes") for path in paths), *groups]


# ---- the rows ----

ACCELERATORS: dict[str, Accelerator] = {
    row.target: row
    for row in (
        Accelerator("cpu"),
        Accelerator(
            "cuda",
            vendor="NVIDIA",
            read=read_nvidia,
            flags=nvidia_flags,
            runtime="cuda",
            architecture=r"sm_\d+",
            collectives="nccl",
            runtime_library="cudart",
            oldest_driver={"12": "525.60.13", "13": "580.65.06"},  # Linux, NVIDIA's CUDA release notes
            resource="nvidia.com/gpu",
            apptainer=Flag("nv", "", "the driver's libraries and devices"),
            driver_module="nvidia",
            container_toolkit=True,
            code_runs_on=same_cuda_major,
        ),
        Accelerator(
            "rocm",
            vendor="AMD",
            read=read_amd,
            flags=amd_flags,
            runtime="rocm",
            architecture=r"gfx[0-9a-f]+",
            collectives="rccl",
            runtime_library="amdhip64",
            resource="amd.com/gpu",
            apptainer=Flag("rocm", "", "the GPUs' devices"),
            driver_module="amdgpu",
            render_nodes=True,
            device_files=(KFD, "/dev/dri/renderD*"),
            assumed_architecture="gfx942",
            numa_balancing_hurts=True,
        ),
    )
}
