"""What a chip should reach, from its vendor's data sheet, one row each.

Matrix products are of bfloat16 with dense operands and float32 sums. An MI250X is two devices, each with half of it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """`names` are parts of the name that torch gives the device; the first row that has one applies."""

    names: tuple[str, ...]
    matrix: float
    """TFLOP/s."""
    memory: float
    """GB/s."""
    source: str
    link: float = 0.0
    """GB/s in one direction to the other GPUs of a node, over all links; 0 where boards differ. Not a lower limit:
    without a switch, two GPUs of a node use only some of their links."""


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_AMD = "https://www.amd.com/en/products/accelerators/instinct/"

CHIPS = (
    Chip(("GB200", "B200"), 2250, 8000, f"{_NVIDIA}dgx-b200/", link=900),
    Chip(("GH200 480GB",), 989, 4000, f"{_NVIDIA}grace-hopper-superchip/"),
    Chip(("H200 NVL",), 835, 4800, f"{_NVIDIA}h200/"),
    Chip(("H200",), 989, 4800, f"{_NVIDIA}h200/", link=450),
    Chip(("H100 NVL",), 835, 3900, f"{_NVIDIA}h100/"),
    Chip(("H100 PCIe",), 756, 2000, f"{_NVIDIA}h100/"),
    Chip(("H100",), 989, 3350, f"{_NVIDIA}h100/", link=450),
    Chip(("H800",), 989, 3350, f"{_NVIDIA}h100/"),
    Chip(("A100-SXM4-40GB", "A100-PCIE-40GB"), 312, 1555, f"{_NVIDIA}a100/"),
    Chip(("A100-PCIE-80GB", "A100 80GB PCIe"), 312, 1935, f"{_NVIDIA}a100/"),
    Chip(("A100", "A800"), 312, 2039, f"{_NVIDIA}a100/"),
    Chip(("L40S",), 362, 864, f"{_NVIDIA}l40s/"),
    Chip(("MI355X",), 2500, 8000, f"{_AMD}mi350/mi355x.html"),
    Chip(("MI350X",), 2300, 8000, f"{_AMD}mi350/mi350x.html"),
    Chip(("MI325X",), 1307, 6000, f"{_AMD}mi300/mi325x.html", link=448),
    Chip(("MI300X",), 1307, 5300, f"{_AMD}mi300/mi300x.html", link=448),
    Chip(("MI250X",), 191, 1638, f"{_AMD}mi200/mi250x.html"),
)


def chip_of(name: str) -> Chip | None:
    """The row of a device, or None for one that the table lacks."""
    return next((chip for chip in CHIPS if any(part in name for part in chip.names)), None)
