"""The accelerators that images are built for, one row each, and the GPUs that a host has of them.

A target adds a row to `ACCELERATORS`; no other file here compares a target or a vendor.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from entrypoints.host.tree import Tree

_NVIDIA = "proc/driver/nvidia/gpus"
_AMD = "sys/class/kfd/kfd/topology/nodes"
_PCI = "sys/bus/pci/devices"

_NVIDIA_MODELS = (
    ("sm_103", ("B300",)),
    ("sm_100", ("B200", "B100")),
    ("sm_120", ("RTX PRO 6000 Blackwell", "RTX 50")),
    ("sm_90", ("H100", "H200", "H800", "H20", "GH200")),
    ("sm_89", ("L40", "L4", "RTX 40", "6000 Ada")),
    ("sm_80", ("A100", "A800", "A30")),
    ("sm_86", ("A10", "A40", "A16", "A2", "RTX 30", "RTX A")),
    ("sm_75", ("T4", "RTX 20", "TITAN RTX")),
    ("sm_70", ("V100", "TITAN V")),
)
"""NVIDIA's driver files name only the model. https://developer.nvidia.com/cuda-gpus"""


_UUIDS = ("GPU-", "MIG-")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of this host."""

    address: str
    """On the PCI bus, `0000:1b:00.0`."""
    architecture: str | None
    """`gfx942`, `sm_90`; None for an unknown model."""
    model: str = "unknown"
    """As compilers tell GPUs apart: `NVIDIA H200`, `gfx942`."""
    pci_path: tuple[str, ...] = ()
    """The bridges above it and itself, from the root complex down."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The facts of one kind of accelerator. Paths are relative to the host's root."""

    target: str
    """The image's target, as in its manifest."""
    vendor: str
    architecture_prefix: str
    """The prefix of its architectures: `sm_`."""
    find: Callable[[Tree], list[Gpu]]
    """The GPUs that the driver reports."""
    shared_devices: tuple[str, ...] = ()
    """Device files that all its GPUs share."""
    gpu_devices: str
    """Pattern of the device files that each GPU has: `dev/nvidia[0-9]*`."""
    counted_by_devices: bool = False
    """Whether its device files tell how many GPUs a container may use; otherwise `find` does."""
    run_flags: str
    """The container engine's flags that hand in the devices."""
    visible_variables: tuple[str, ...]
    """The variables that restrict a process to some GPUs; the one that Ray reads comes first. Each of the others
    restricts it further, and the first one's indices then count what they leave."""
    tool: str
    """The program that lists its GPUs."""
    driver_path: str
    """A path that exists if the driver is loaded."""
    driver_version_file: str
    driver_fix: str
    """The hint to install the driver."""
    component: str
    """The user-space stack that depends on the driver, as environment tables call it: `cuda`, `rocm`."""
    minimum_drivers: tuple[tuple[int, tuple[int, ...]], ...]
    """The oldest driver for each major version of the component, the newest version first."""
    driver_required: bool
    """Whether an older driver breaks the image; otherwise it is only unsupported."""
    packages: Mapping[str, tuple[str, ...]]
    """The distributions whose version is a component's, the preferred one first."""
    torch_tag: str
    """The prefix of the component's version in torch's local version: `cu` in `2.11.0+cu130`."""
    version_file: str | None = None
    """A file of the image or host that holds the component's version."""
    own_settings: tuple[str, ...] = ()
    """Prefixes of variables that only its libraries read."""
    backend: str
    """torch.distributed's backend of its collective library."""
    device: str
    """torch's name of the device."""


def find_gpus(tree: Tree) -> tuple[Gpu, ...]:
    """All GPUs that any driver reports, ordered by address."""
    gpus = [gpu for accelerator in ACCELERATORS for gpu in accelerator.find(tree)]
    return tuple(sorted(gpus, key=lambda gpu: gpu.address))


def architectures(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """The distinct architectures of the GPUs, in their order; unknown ones are left out."""
    return tuple(dict.fromkeys(gpu.architecture for gpu in gpus if gpu.architecture))


def accelerator_of(target: str | None) -> Accelerator | None:
    """The accelerator of an image's target; None for the cpu image and outside an image."""
    return next((row for row in ACCELERATORS if row.target == target), None)


def driver_version(tree: Tree, accelerator: Accelerator) -> str:
    """The version of the host's kernel driver; empty where the host does not tell it."""
    text = tree.text(accelerator.driver_version_file) or ""
    return next((word for word in text.split() if word[:1].isdigit() and "." in word), "")


def may_use_gpus(target: str | None) -> bool:
    """Whether a process of this image uses GPUs. Outside an image it may."""
    return target is None or accelerator_of(target) is not None


def count_gpus(tree: Tree) -> int:
    """GPUs that this container can open."""
    for row in ACCELERATORS:
        if count := len(tree.matching(row.gpu_devices)) if row.counted_by_devices else len(row.find(tree)):
            return count
    return 0


def visible_devices(text: str) -> list[str]:
    """The devices in a variable like CUDA_VISIBLE_DEVICES: indices or UUIDs. The first word that is neither ends them.

    Slurm writes `NoDevFiles` and others `-1`, `none` or nothing to hide all devices.
    https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html
    """
    words = (word.strip() for word in text.split(","))
    return list(itertools.takewhile(lambda word: word.isdigit() or word.upper().startswith(_UUIDS), words))


def hidden_devices(variables: Mapping[str, str]) -> dict[str, int]:
    """For each variable that restricts this process, how many devices it leaves."""
    names = (name for row in ACCELERATORS for name in row.visible_variables)
    return {name: len(visible_devices(variables[name])) for name in names if name in variables}


def foreign_settings(vendors: tuple[str, ...]) -> tuple[str, ...]:
    """Prefixes of variables that only accelerators without a GPU here read. `found` are the architectures here."""
    absent = [row for row in ACCELERATORS if not any(name.startswith(row.architecture_prefix) for name in vendors)]
    return tuple(prefix for row in absent for prefix in row.own_settings)


def _find_nvidia(tree: Tree) -> list[Gpu]:
    gpus = []
    for address in tree.names(_NVIDIA):
        information = tree.text(f"{_NVIDIA}/{address}/information") or ""
        model = next(
            (line.partition(":")[2].strip() for line in information.splitlines() if line.startswith("Model")), ""
        )
        architecture = next(
            (arch for arch, names in _NVIDIA_MODELS if any(_is_model(model, name) for name in names)), None
        )
        path = tree.pci_path(f"{_PCI}/{address}")
        gpus.append(Gpu(address=address, architecture=architecture, model=model or "unknown", pci_path=path))
    return gpus


def _is_model(model: str, name: str) -> bool:
    """`L4` matches `NVIDIA L4` but not `NVIDIA L40S`; `RTX 40` matches `GeForce RTX 4090`."""
    if name.startswith(("RTX 20", "RTX 30", "RTX 40", "RTX 50", "RTX A")):
        return name in model
    words = model.replace("-", " ").split()
    return any(word == name or (word.startswith(name) and not word[len(name) :][0].isdigit()) for word in words) or (
        " " in name and name in model
    )


def _find_amd(tree: Tree) -> list[Gpu]:
    gpus = []
    for node in tree.names(_AMD):
        if (tree.text(f"{_AMD}/{node}/gpu_id") or "0") == "0":
            continue  # a CPU
        lines = (tree.text(f"{_AMD}/{node}/properties") or "").splitlines()
        properties = dict(line.split(maxsplit=1) for line in lines if " " in line)
        location, domain = int(properties.get("location_id", 0)), int(properties.get("domain", 0))
        address = f"{domain:04x}:{location >> 8:02x}:{(location >> 3) & 31:02x}.{location & 7:x}"
        architecture = _gfx(int(properties.get("gfx_target_version", 0)))
        path = tree.pci_path(f"{_PCI}/{address}")
        gpus.append(Gpu(address=address, architecture=architecture, model=architecture or "unknown", pci_path=path))
    return gpus


def _gfx(target: int) -> str | None:
    """`gfx_target_version` 90402 is gfx942. The last two parts are hexadecimal digits: 90010 is gfx90a."""
    return f"gfx{target // 10_000}{target // 100 % 100:x}{target % 100:x}" if target else None


ACCELERATORS = (
    Accelerator(
        target="cuda",
        vendor="NVIDIA",
        architecture_prefix="sm_",
        find=_find_nvidia,
        gpu_devices="dev/nvidia[0-9]*",
        counted_by_devices=True,  # a container sees the driver's files of all GPUs, but the devices of its own
        run_flags="--gpus all",
        visible_variables=("CUDA_VISIBLE_DEVICES",),
        tool="nvidia-smi",
        driver_path="proc/driver/nvidia/version",
        driver_version_file="proc/driver/nvidia/version",
        driver_fix="install NVIDIA's driver, or use the cpu image",
        component="cuda",
        # https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
        minimum_drivers=((13, (580,)), (12, (525,)), (11, (450,))),
        driver_required=True,
        packages={
            "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
            "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
        },
        torch_tag="cu",
        own_settings=("NVSHMEM_",),
        backend="nccl",
        device="cuda",
    ),
    Accelerator(
        target="rocm",
        vendor="AMD",
        architecture_prefix="gfx",
        find=_find_amd,
        shared_devices=("dev/kfd",),
        gpu_devices="dev/dri/renderD*",
        run_flags="--device /dev/kfd --device /dev/dri",
        visible_variables=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        tool="rocm-smi",
        driver_path="sys/class/kfd",
        driver_version_file="sys/module/amdgpu/version",
        driver_fix="load amdgpu, or use the cpu image",
        component="rocm",
        # https://rocm.docs.amd.com/projects/install-on-linux/en/latest/reference/user-kernel-space-compat-matrix.html
        minimum_drivers=((7, (6, 10)),),
        driver_required=False,
        packages={},
        torch_tag="rocm",
        version_file="opt/rocm/.info/version",
        backend="nccl",
        device="cuda",
    ),
)
