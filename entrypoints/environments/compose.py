"""Docker Compose and Swarm: the replicas of one service, found through Docker's own DNS.

`tasks.<service>` (Swarm) and `<service>` (Compose) resolve to the addresses of all replicas. The nodes are these
addresses in numerical order; this node is the one whose address it has.
"""

import ipaddress
import socket

from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.explicit import NODES
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError, NotYetThereError

SERVICE = "SLIPWAY_SERVICE"


class Compose(Environment):
    name = "compose"
    last_resort = True
    precedence = 610
    title = "Docker Compose, Swarm"
    reads = (SERVICE, NODES, "DNS: tasks.<service>")
    caveats = "Replicas appear in DNS one after the other. `launch` waits until there are as many as --nodes."
    start = "docker service create --replicas 2 -e SLIPWAY_SERVICE={{.Service.Name}} -e SLIPWAY_NODES=2 IMAGE …"
    source = "https://docs.docker.com/engine/swarm/networking/"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        service = reader.text(SERVICE)
        if service is None:
            return None
        count = reader.required_number(NODES, hint=f"set --nodes or {NODES} to the number of replicas of {service}")
        name, addresses = _addresses(service)
        if len(addresses) < count:
            raise NotYetThereError(f"{name} has {len(addresses)} addresses so far, not {count}")
        if len(addresses) > count:
            raise DetectionError(
                f"{name} has {len(addresses)} addresses, but {NODES} is {count}: {', '.join(addresses)}"
            )
        mine = [address for address in addresses if address in view.addresses]
        if len(mine) != 1:
            raise DetectionError(f"none of the addresses of {name} is this node's: {', '.join(addresses)}")
        reader.used[name] = ",".join(addresses)
        return Allocation(
            environment=cls.name,
            job_id=service,
            node_count=count,
            node_rank=addresses.index(mine[0]),
            hosts=tuple(addresses),
            head=addresses[0],
            variables=reader.used,
        )


def _addresses(service: str) -> tuple[str, list[str]]:
    """The name that resolves, and its addresses in numerical order."""
    for name in (f"tasks.{service}", service):
        try:
            entries = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            continue
        return name, sorted({str(entry[4][0]) for entry in entries}, key=ipaddress.ip_address)
    return service, []
