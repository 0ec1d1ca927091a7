"""The GPUs of this host: where they are on the PCI bus, and their architecture."""

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
"""The driver's files name the model only. https://developer.nvidia.com/cuda-gpus"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    address: str
    """On the PCI bus, `0000:1b:00.0`."""
    architecture: str | None
    """`gfx942`, `sm_90`; None for a model that is not known."""
    pci_path: tuple[str, ...] = ()


def find_gpus(tree: Tree) -> tuple[Gpu, ...]:
    """All GPUs that the drivers of NVIDIA and AMD report, in the order of their addresses."""
    found = [*_nvidia(tree), *_amd(tree)]
    return tuple(sorted(found, key=lambda gpu: gpu.address))


def architectures(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(gpu.architecture for gpu in gpus if gpu.architecture))


def _nvidia(tree: Tree) -> list[Gpu]:
    found = []
    for address in tree.names(_NVIDIA):
        information = tree.text(f"{_NVIDIA}/{address}/information") or ""
        model = next(
            (line.partition(":")[2].strip() for line in information.splitlines() if line.startswith("Model")), ""
        )
        architecture = next(
            (arch for arch, names in _NVIDIA_MODELS if any(_is_model(model, name) for name in names)), None
        )
        path = tree.pci_path(f"{_PCI}/{address}")
        found.append(Gpu(address=address, architecture=architecture, pci_path=path))
    return found


def _is_model(model: str, name: str) -> bool:
    """`L4` is in `NVIDIA L4` and not in `NVIDIA L40S`; `RTX 40` is in `GeForce RTX 4090`."""
    if name.startswith(("RTX 20", "RTX 30", "RTX 40", "RTX 50", "RTX A")):
        return name in model
    return any(
        word == name or (word.startswith(name) and not word[len(name) :][0].isdigit()) for word in words(model)
    ) or (" " in name and name in model)


def words(model: str) -> list[str]:
    return model.replace("-", " ").split()


def _amd(tree: Tree) -> list[Gpu]:
    found = []
    for node in tree.names(_AMD):
        if (tree.text(f"{_AMD}/{node}/gpu_id") or "0") == "0":
            continue  # a CPU
        lines = (tree.text(f"{_AMD}/{node}/properties") or "").splitlines()
        properties = dict(line.split(maxsplit=1) for line in lines if " " in line)
        location, domain = int(properties.get("location_id", 0)), int(properties.get("domain", 0))
        address = f"{domain:04x}:{location >> 8:02x}:{(location >> 3) & 31:02x}.{location & 7:x}"
        path = tree.pci_path(f"{_PCI}/{address}")
        target = int(properties.get("gfx_target_version", 0))
        found.append(Gpu(address=address, architecture=_gfx(target), pci_path=path))
    return found


def _gfx(target: int) -> str | None:
    """`gfx_target_version` 90402 is gfx942; the last two are hexadecimal digits: 90010 is gfx90a."""
    return f"gfx{target // 10_000}{target // 100 % 100:x}{target % 100:x}" if target else None
