"""Labels that say where a node is."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from entrypoints.host.network.topology import nvlink_domain, rack, topology_labels


class NoAnswerError(Exception):
    """What the mock raises for the driver."""


class FabricInfo(ctypes.Structure):
    _fields_ = [
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
    ]


def driver(cluster: bytes, state: int = 3, error: Exception | None = None) -> Any:
    def ask(_gpu: int, answer: Any) -> None:
        if error:
            raise error
        info = answer._obj
        info.clusterUuid[:], info.cliqueId, info.state = list(cluster), 7, state

    return SimpleNamespace(
        NVMLError=NoAnswerError,
        NVML_GPU_FABRIC_STATE_COMPLETED=3,
        c_nvmlGpuFabricInfo_t=FabricInfo,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetGpuFabricInfo=ask,
    )


@pytest.mark.parametrize(
    ("address", "pattern", "expected"),
    [
        ("core.leaf3.node17", "switch.switch.node", "leaf3"),
        ("block1.node17", "block.node", "block1"),
        ("core.leaf3.node17.example.org", "switch.switch.node", "leaf3"),
        ("node17", "node", None),
        ("core", "switch.switch.node", None),
        ("", "", None),
    ],
)
def test_the_rack_is_what_slurm_names_above_the_node(address: str, pattern: str, expected: str | None) -> None:
    environment = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert rack(environment) == expected


def test_the_nvlink_domain_is_what_a_mock_of_the_driver_reports() -> None:
    assert nvlink_domain(driver(bytes(range(16)))) == "000102030405060708090a0b0c0d0e0f.7"
    assert nvlink_domain(driver(bytes(16))) is None  # NVLink ends at the node
    assert nvlink_domain(driver(bytes(range(16)), state=2)) is None
    assert nvlink_domain(driver(b"", error=NoAnswerError())) is None


def test_labels_hold_what_ray_allows() -> None:
    environment = {"SLURM_TOPOLOGY_ADDR": "rack 7/b.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}
    assert topology_labels(environment) == {"rack": "rack-7-b"}
