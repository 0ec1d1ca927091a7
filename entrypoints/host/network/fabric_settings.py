"""Environment variables for the chosen adapters and interface, each with its reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from entrypoints.host.network.rails import RailChoice
from entrypoints.host.versions import release

NO_RDMA, NCCL_HCAS = "NCCL_IB_DISABLE", "NCCL_IB_HCA"
_NCCL_CHOOSES = (2, 21)
"""Since this version NCCL finds the GID index of RoCE v2 itself. A wrong index hangs or falls back to sockets."""


@dataclass(frozen=True)
class Setting:
    """An environment variable that depends on this host, and the reason for its value."""

    name: str
    value: str
    reason: str


def apply(environment: Mapping[str, str], settings: Sequence[Setting]) -> dict[str, str]:
    """The environment with the settings that it lacks. Of several settings for one name the first wins."""
    chosen = {setting.name: setting.value for setting in reversed(settings)}
    return chosen | dict(environment)


def fabric_settings(choice: RailChoice, nccl: str | None) -> tuple[list[Setting], list[str]]:
    """Settings for the adapters, and warnings. `nccl` is the version of NCCL or RCCL, None if unknown."""
    hcas = choice.hcas
    if choice.kind == "ethernet":
        if not choice.excluded:
            return [], []
        reason = "no adapter of this host is usable: " + "; ".join(f"{name}: {rule}" for name, rule in choice.excluded)
        return [Setting(NO_RDMA, "1", reason)], [without_rdma(choice)] if choice.unused else []
    if choice.kind == "efa":
        reason = f"{len(hcas)} EFA devices: RDMA for NCCL's network plug-in"
        return [Setting("FI_EFA_USE_DEVICE_RDMA", "1", reason)], []
    fabric_name = "InfiniBand" if choice.kind == "infiniband" else "RoCE"
    left_out = ", ".join(name for name, _ in choice.excluded)
    reason = f"{len(hcas)} active {fabric_name} rails in the order of the GPUs" + (
        f"; without {left_out}" if left_out else ""
    )
    several = len({hca.name for hca in hcas}) < len(hcas) or any(":" in name for name, _ in choice.excluded)
    names = ",".join(f"{hca.name}:{hca.port}" if several else hca.name for hca in hcas)
    ports = ",".join(f"{hca.name}:{hca.port}" for hca in hcas)
    settings = [
        Setting(NCCL_HCAS, f"={names}", f"{reason}; = matches exact names, otherwise mlx5_1 would match mlx5_10 too"),
        Setting("UCX_NET_DEVICES", ports, reason),
        Setting("NVSHMEM_HCA_LIST", ports, reason),
    ]
    if choice.kind == "infiniband":
        return settings, []
    extra, warnings = _gid_index(choice, nccl)
    return settings + extra, warnings


def without_rdma(choice: RailChoice) -> str:
    """A warning that no adapter is used although some are active."""
    return (
        f"RDMA is off, so NCCL uses sockets, which are many times slower, although adapters are active: {choice.unused}"
    )


def interface_settings(interface: str | None, reason: str) -> list[Setting]:
    """Settings that make the libraries connect over this interface; none without one."""
    if interface is None:
        return []
    return [
        Setting("NCCL_SOCKET_IFNAME", f"={interface}", f"{interface}: {reason}"),
        Setting("GLOO_SOCKET_IFNAME", interface, f"{interface}: {reason}"),
        Setting("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", interface, f"{interface}: {reason}"),
    ]


def _gid_index(choice: RailChoice, nccl: str | None) -> tuple[list[Setting], list[str]]:
    without = [hca.name for hca in choice.hcas if hca.roce_v2 is None]
    warnings = [f"{', '.join(without)}: no RoCE v2 address, so traffic cannot be routed"] if without else []
    if nccl is None or release(nccl) >= _NCCL_CHOOSES:
        return [], warnings
    indices = {hca.roce_v2 for hca in choice.hcas if hca.roce_v2 is not None}
    if len(indices) != 1:
        if indices:
            warnings.append(f"NCCL {nccl} takes one GID index, but the adapters need different ones: {sorted(indices)}")
        return [], warnings
    reason = f"RoCE v2 over IPv4 on every rail; NCCL {nccl} cannot find the index itself, 2.21 and newer can"
    index = str(indices.pop())
    return [Setting("NCCL_IB_GID_INDEX", index, reason), Setting("NVSHMEM_IB_GID_INDEX", index, reason)], warnings
