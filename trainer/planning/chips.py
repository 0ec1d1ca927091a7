"""Dense bfloat16 FLOP/s of the chips that a run may compute on, for its model FLOPs utilisation (MFU)."""

# Parts of the name that torch gives a device, and TFLOP/s by the vendor's data sheet; the first row that fits applies.
# `launch preflight --speed` has the same table with sources in entrypoints/host/chips.py; a test compares both.
DENSE_BF16_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB200", "B200"), 2250),
    (("GH200 480GB",), 989),
    (("H200 NVL",), 835),
    (("H200",), 989),
    (("H100 NVL",), 835),
    (("H100 PCIe",), 756),
    (("H100",), 989),
    (("H800",), 989),
    (("A100-SXM4-40GB", "A100-PCIE-40GB"), 312),
    (("A100-PCIE-80GB", "A100 80GB PCIe"), 312),
    (("A100", "A800"), 312),
    (("L40S",), 362),
    (("MI355X",), 2500),
    (("MI350X",), 2300),
    (("MI325X",), 1307),
    (("MI300X",), 1307),
    (("MI250X",), 191),
)


def dense_bf16_flops(device: str) -> float | None:
    """FLOP/s of a device by its name; None for one that the table lacks."""
    rates = (rate for parts, rate in DENSE_BF16_TFLOPS if any(part in device for part in parts))
    rate = next(rates, None)
    return None if rate is None else rate * 1e12
