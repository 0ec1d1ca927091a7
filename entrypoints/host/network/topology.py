"""A node's place in the cluster's network, as labels by which Ray places actors."""

import ctypes
import re
from collections.abc import Mapping
from types import ModuleType

RACK, NVLINK_DOMAIN = "rack", "nvlink-domain"
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9._-]")


def topology_labels(environment: Mapping[str, str]) -> dict[str, str]:
    """The rack and the NVLink domain, where Slurm and NVIDIA's driver name them."""
    try:
        import pynvml
    except ImportError:  # AMD's images lack it
        domain = None
    else:
        domain = nvlink_domain(pynvml)
    labels = {RACK: rack(environment), NVLINK_DOMAIN: domain}
    return {name: _NOT_IN_LABELS.sub("-", value)[:63] for name, value in labels.items() if value}


def rack(environment: Mapping[str, str]) -> str | None:
    """The switch or block next to this node, which is the rack in most clusters.

    SLURM_TOPOLOGY_ADDR names everything from the top switch to the node (https://slurm.schedmd.com/sbatch.html).
    """
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(kinds) < 2 or kinds[-1] != "node":
        return None
    # A name of a node may hold periods; those of switches must not.
    return names[len(kinds) - 2] if len(names) >= len(kinds) else None


def nvlink_domain(nvml: ModuleType) -> str | None:
    """Cluster and clique of the first GPU, whose NVLink reaches all GPUs with the same; None within a single node.

    `nvml` is the module pynvml (https://docs.nvidia.com/deploy/nvml-api/structnvmlGpuFabricInfo__t.html).
    """
    info = nvml.c_nvmlGpuFabricInfo_t()
    try:
        nvml.nvmlInit()
        nvml.nvmlDeviceGetGpuFabricInfo(nvml.nvmlDeviceGetHandleByIndex(0), ctypes.byref(info))
    except nvml.NVMLError:
        return None
    cluster = bytes(info.clusterUuid)
    if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or not any(cluster):
        return None
    return f"{cluster.hex()}.{info.cliqueId}"
