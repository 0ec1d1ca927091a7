"""`launch preflight --speed`. Skipped without Ray and torch, which the images have."""

from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs Ray, which the images have")
pytest.importorskip("torch", reason="needs torch, which the images have")

from entrypoints.preflight.speed import DeviceSpeed, chip_of, chips, gpu_health, problems

H200 = {"name": "NVIDIA H200", "matrix": 760.0, "memory": 4200.0, "to_device": 55.0, "to_host": 55.0, "between": 360.0}


def gpus(**changes: dict[str, float]) -> list[DeviceSpeed]:
    """Two nodes of four GPUs, of which those named like `n1_gpu2` differ."""
    return [
        DeviceSpeed(host=host, device=f"gpu {index}", **H200 | changes.get(f"{host}_gpu{index}", {}))
        for host in ("n0", "n1")
        for index in range(4)
    ]


@pytest.mark.parametrize(
    ("name", "matrix"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2250),
        ("AMD Instinct MI300X", 1307),
        ("AMD Instinct MI250X / MI250", 191),
    ],
)
def test_a_chip_is_known_by_the_name_that_torch_gives_it(name: str, matrix: float) -> None:
    chip = chip_of(name)
    assert chip is not None
    assert chip.matrix == matrix


def test_every_row_of_the_data_sheets_applies_to_its_own_names() -> None:
    assert [chip_of(name) for chip in chips() for name in chip.names] == [chip for chip in chips() for _ in chip.names]
    assert chip_of("NVIDIA GeForce RTX 9090") is None


def test_the_slow_gpu_is_named_with_what_is_usual() -> None:
    assert problems(gpus()) == {}
    assert problems(gpus(n1_gpu2={"matrix": 610.0})) == {
        "n1": ["gpu 2: 610 TFLOP/s in matrix products, and 760 is usual here"]
    }
    assert problems(gpus(n0_gpu0={"to_host": 12.0})) == {"n0": ["gpu 0: 12 GB/s to the host, and 55 is usual here"]}


def test_gpus_that_are_all_slow_are_seen_against_the_data_sheet() -> None:
    slow = [DeviceSpeed(host="n0", device="gpu 0", **H200 | {"matrix": 500.0})]
    assert problems(slow) == {"n0": ["gpu 0: 500 TFLOP/s in matrix products, of 989 in the data sheet"]}


def test_chips_of_different_kinds_are_not_compared() -> None:
    mixed = [*gpus(), DeviceSpeed(host="n2", device="gpu 0", name="NVIDIA L40S", matrix=300.0, memory=750.0)]
    assert problems(mixed) == {}


def mocked_nvml(**answers: Any) -> ModuleType:
    """A module with NVML's functions for one GPU; those without an answer are not supported."""
    nvml = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def answer(name: str) -> Any:
        def function(*_: object) -> Any:
            if name not in answers:
                raise NVMLError
            return answers[name]

        return function

    names = (
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetComputeRunningProcesses",
    )
    known: dict[str, Any] = {name: answer(name) for name in names}
    known |= {"NVMLError": NVMLError, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0}
    known |= {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
    }
    vars(nvml).update(known)
    return nvml


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({"nvmlDeviceGetTotalEccErrors": 2}, "gpu 0: 2 uncorrected memory errors since the driver started"),
        (
            {"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)},
            "gpu 0: a broken row of its memory waits for a reset of the GPU to be replaced",
        ),
        (
            {"nvmlDeviceGetRemappedRows": (0, 9, 1, 1)},
            "gpu 0: its memory has more broken rows than it can replace: have it exchanged",
        ),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x60}, "gpu 0: its clocks are lowered by heat"),
        ({"nvmlDeviceGetComputeRunningProcesses": [object()] * 3}, "gpu 0: 3 other programs use it"),
    ],
)
def test_what_the_driver_knows_is_said_with_a_mocked_nvml(answers: dict[str, Any], problem: str) -> None:
    assert gpu_health(mocked_nvml(**answers)) == [problem]


def test_a_healthy_or_an_old_gpu_has_no_problem_with_a_mocked_nvml() -> None:
    healthy = {
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetRemappedRows": (3, 0, 0, 0),
        "nvmlDeviceGetCurrentClocksEventReasons": 0x1,  # idle
        "nvmlDeviceGetComputeRunningProcesses": [],
    }
    assert gpu_health(mocked_nvml(**healthy)) == gpu_health(mocked_nvml()) == []
