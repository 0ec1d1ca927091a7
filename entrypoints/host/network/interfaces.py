"""Network interfaces of this host, by route and by address."""

import fcntl
import socket
import struct
from ipaddress import IPv6Address

from entrypoints.host.tree import Tree

INTERFACE = "SLIPWAY_INTERFACE"
_SIOCGIFADDR = 0x8915
_LINK_SCOPE = "20"
_INSIDE = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "tunl", "podman")
"""Prefixes of interfaces whose traffic never leaves the host."""


def guess_interface(tree: Tree) -> tuple[str | None, str]:
    """The interface with the default route, else the first that is up, with the reason."""
    if name := default_route(tree):
        return name, "it has the default route"
    for name in tree.names("sys/class/net"):
        if not name.startswith(_INSIDE) and tree.text(f"sys/class/net/{name}/operstate") == "up":
            return name, "the first interface that is up, without a default route"
    return None, "no interface is up"


def default_route(tree: Tree) -> str | None:
    """The interface of the default route with the lowest metric."""
    rows = [line.split() for line in (tree.text("proc/net/route") or "").splitlines()[1:]]
    routes = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(routes)[1] if routes else None


def interface_of(address: str) -> str | None:
    """The interface of this host with this address; None if there is none."""
    if ":" in address:
        return next((name for name, other in _ipv6_addresses() if other == address), None)
    return next((name for _, name in socket.if_nameindex() if _ipv4_address(name) == address), None)


def address_of(interface: str) -> str | None:
    """An interface's IPv4 address, else its IPv6 address; None if it has none."""
    return _ipv4_address(interface) or next((address for name, address in _ipv6_addresses() if name == interface), None)


def bracketed(address: str) -> str:
    """The address as written before a port: `[::1]` for IPv6, `127.0.0.1` unchanged."""
    return f"[{address}]" if ":" in address else address


def _ipv4_address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Pairs of interface and address, without link-local addresses, which mean nothing without the interface."""
    rows = [line.split() for line in (Tree().text("proc/net/if_inet6") or "").splitlines()]
    return [(row[5], str(IPv6Address(int(row[0], 16)))) for row in rows if row[3] != _LINK_SCOPE]
