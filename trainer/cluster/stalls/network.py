"""Finds unreachable nodes from TCP connections whose data is not acknowledged or whose address is gone."""

import ipaddress
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# A peer does not acknowledge data that was sent at least this many times again.
RESENT = 2
_ESTABLISHED, _LISTENING = "01", "0A"


@dataclass(frozen=True)
class Connections:
    """The TCP connections of a node: its own addresses, those of them that no interface has any more, the peers'
    addresses, and the peers with ports that do not acknowledge data, with how often it was sent."""

    local: frozenset[str] = frozenset()
    orphaned: frozenset[str] = frozenset()
    peers: frozenset[str] = frozenset()
    unacknowledged: tuple[tuple[str, int], ...] = ()

    @property
    def problems(self) -> list[str]:
        problems = [
            f"{address} is on no interface any more, but connections use it" for address in sorted(self.orphaned)
        ]
        return problems + [
            f"{peer} does not acknowledge data, sent {count} times" for peer, count in self.unacknowledged
        ]


def read_connections() -> Connections:
    """The connections of this node."""
    tables = ""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            tables += Path(table).read_text()
    return parse_connections(tables, _addresses())


def parse_connections(tables: str, addresses: Iterable[str]) -> Connections:
    """The connections in /proc/net/tcp and tcp6 of a node whose interfaces have these addresses."""
    local, peers, unacknowledged = set[str](), set[str](), dict[str, int]()
    for line in tables.splitlines():
        fields = line.split()
        if len(fields) < 7 or not fields[0].endswith(":") or fields[3] == _LISTENING:
            continue
        here, peer = _host(fields[1]), _host(fields[2])
        if ipaddress.ip_address(here).is_loopback:
            continue
        peers.add(peer)
        if fields[3] == _ESTABLISHED:
            local.add(here)
        if (resent := int(fields[6], 16)) >= RESENT:
            port = f"{peer}:{_port(fields[2])}"
            unacknowledged[port] = max(unacknowledged.get(port, 0), resent + 1)
    return Connections(
        frozenset(local), frozenset(local.difference(addresses)), frozenset(peers), tuple(unacknowledged.items())
    )


def cut_off(nodes: Mapping[str, Connections]) -> dict[str, str]:
    """The nodes that others cannot reach, with the rest of a sentence that says who and at which address.

    A node that is one end of every silent connection is named alone; if two are, one without its interface is.
    """
    owners = {address: node for node, connections in nodes.items() for address in connections.local}
    silent: dict[tuple[str, str], str] = {}  # from, to: at which address
    for node, connections in nodes.items():
        unanswered = {peer.rpartition(":")[0] for peer, _ in connections.unacknowledged}
        for peer in connections.peers:
            other = owners.get(peer, node)
            if other != node and (peer in unanswered or peer in nodes[other].orphaned):
                silent[node, other] = peer
    if not silent:
        return {}
    suspects = set.intersection(*map(set, silent)) or {to for _, to in silent}
    suspects = {node for node in suspects if nodes[node].orphaned} or suspects
    return {node: _said(node, silent, nodes[node]) for node in nodes if node in suspects}


def _said(node: str, silent: Mapping[tuple[str, str], str], connections: Connections) -> str:
    to_it = {here: address for (here, other), address in silent.items() if other == node}
    from_it = {other: address for (here, other), address in silent.items() if here == node}
    if not to_it:
        return f"its node cannot reach {_several(from_it)} at {_several(from_it.values())}"
    gone = "" if connections.orphaned.isdisjoint(to_it.values()) else ", which is on no interface of it any more"
    return f"{_several(to_it)} cannot reach its node at {_several(to_it.values())}{gone}"


def _several(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = sorted(set(names))
    return f"{', '.join(first)} and {last}" if first else last


def _addresses() -> set[str]:
    """The addresses of the interfaces that are up."""
    states = psutil.net_if_stats()
    return {
        address.address.partition("%")[0]
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if name in states and states[name].isup
    }


def _host(field: str) -> str:
    """`0100007F:1F90` as 127.0.0.1; the kernel writes each 32-bit word in the host's byte order."""
    host = field.partition(":")[0]
    words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def _port(field: str) -> int:
    return int(field.partition(":")[2], 16)
