"""The RDMA adapters (HCAs) of this host, one entry per port.

https://docs.kernel.org/admin-guide/abi-stable-files.html (sysfs-class-infiniband)
"""

from dataclasses import dataclass

from entrypoints.host.tree import Tree

_CLASS = "sys/class/infiniband"
_AMAZON = "0x1d0f"
_MICROSOFT = "0x1414"
_VIRTUAL_FUNCTIONS = {
    "0x15b3": {"0x1012", "0x1014", "0x1016", "0x1018", "0x101a", "0x101c", "0x101e"},  # mlx5
    "0x14e4": {"0x16dc", "0x16e1", "0x1806", "0x1807", "0x1808", "0x1809", "0x1819", "0x181b"},  # bnxt
}
"""Ids of virtual functions by vendor. A virtual machine sees no physical function beside them, so only ids tell."""
_IPV4_MAPPED = "0000:0000:0000:0000:0000:ffff:"
_MOST_GIDS = 16


@dataclass(frozen=True, kw_only=True)
class Hca:
    """One port of an RDMA adapter."""

    name: str
    port: int
    active: bool
    link_layer: str
    """`infiniband`, `ethernet` or `efa`."""
    rate: float
    """Gbit/s."""
    netdev: str | None
    """The network interface of the port."""
    is_here: bool
    """Whether an interface of the port is in this network namespace. RDMA devices may be visible in all of them."""
    is_part: bool
    """Whether its interface is part of another one, as the virtual function beside a hypervisor's adapter is."""
    mtu: int | None
    """Bytes, of the network interface."""
    virtual: bool
    """Whether it is a virtual function (SR-IOV) or a hypervisor's adapter."""
    roce_v2: int | None
    """The index of the first GID of type RoCE v2 with an IPv4 address; None on InfiniBand or without such a GID."""
    roce_v1: bool
    """Whether any GID is of RoCE v1."""
    numa_node: int | None
    pci_path: tuple[str, ...] = ()


def find_hcas(tree: Tree) -> tuple[Hca, ...]:
    """All ports of all adapters, active or not, ordered by name."""
    return tuple(
        _read(tree, name, port)
        for name in tree.names(_CLASS)
        for port in tree.names(f"{_CLASS}/{name}/ports")
        if port.isdigit()
    )


def _read(tree: Tree, name: str, port: str) -> Hca:
    device, base = f"{_CLASS}/{name}/device", f"{_CLASS}/{name}/ports/{port}"
    vendor = tree.text(f"{device}/vendor") or ""
    amazon = vendor == _AMAZON or tree.pci_path(f"{device}/driver")[-1:] == ("efa",) or name.startswith("efa_")
    link_layer = "efa" if amazon else (tree.text(f"{base}/link_layer") or "").lower()
    netdev = _netdev(tree, name, port)
    types = {
        index: tree.text(f"{base}/gid_attrs/types/{index}") or "" for index in tree.names(f"{base}/gids")[:_MOST_GIDS]
    }
    interfaces = {tree.text(f"{base}/gid_attrs/ndevs/{index}") for index in types} | {netdev}
    roce = link_layer == "ethernet"
    virtual = tree.exists(f"{device}/physfn") or vendor == _MICROSOFT
    return Hca(
        name=name,
        port=int(port),
        active="ACTIVE" in (tree.text(f"{base}/state") or ""),
        link_layer=link_layer,
        rate=_rate(tree.text(f"{base}/rate")),
        netdev=netdev,
        is_here=any(tree.exists(f"sys/class/net/{interface}") for interface in interfaces),
        is_part=tree.exists(f"sys/class/net/{netdev}/master"),
        mtu=tree.number(f"sys/class/net/{netdev}/mtu") if netdev else None,
        virtual=virtual or (tree.text(f"{device}/device") or "") in _VIRTUAL_FUNCTIONS.get(vendor, ()),
        roce_v2=_first_ipv4(tree, base, types) if roce else None,
        roce_v1=roce and any(kind.endswith("v1") for kind in types.values()),
        numa_node=tree.number(f"{device}/numa_node"),
        pci_path=tree.pci_path(device) or _by_slot(tree, device),
    )


def _by_slot(tree: Tree, device: str) -> tuple[str, ...]:
    """The PCI path by the device's slot name, for a tree without the link to it."""
    lines = (tree.text(f"{device}/uevent") or "").splitlines()
    slot = next((line.partition("=")[2] for line in lines if line.startswith("PCI_SLOT_NAME=")), None)
    return tree.pci_path(f"sys/bus/pci/devices/{slot}") if slot else ()


def _netdev(tree: Tree, name: str, port: str) -> str | None:
    """The port's network interface: named in the GID table or, for IPoIB, below the PCI device."""
    if interface := tree.text(f"{_CLASS}/{name}/ports/{port}/gid_attrs/ndevs/0"):
        return interface
    netdevs = tree.names(f"{_CLASS}/{name}/device/net")
    for netdev in netdevs:
        if tree.number(f"sys/class/net/{netdev}/dev_port") == int(port) - 1:
            return netdev
    return netdevs[0] if len(netdevs) == 1 else None


def _rate(text: str | None) -> float:
    """`400 Gb/sec (4X NDR)` as 400.0."""
    try:
        return float((text or "").split()[0])
    except (ValueError, IndexError):
        return 0.0


def _first_ipv4(tree: Tree, base: str, types: dict[str, str]) -> int | None:
    for index, kind in types.items():
        gid = tree.text(f"{base}/gids/{index}") or ""
        if kind == "RoCE v2" and gid.startswith(_IPV4_MAPPED):
            return int(index)
    return None
