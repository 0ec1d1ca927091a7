"""The common shape of services: a count of nodes, this node's rank, and the head's name."""

from collections.abc import Sequence

from entrypoints.environments.base import Allocation
from entrypoints.environments.explicit import HEAD
from entrypoints.environments.process_view import ProcessView, Reader
from entrypoints.errors import DetectionError


def counted(
    environment: str,
    view: ProcessView,
    reader: Reader,
    *,
    count: str,
    rank: str,
    head: str | None,
    job_id: str | None,
    hint: str,
    hosts: Sequence[str] | None = None,
) -> Allocation:
    """The allocation from the variables `count` and `rank`, and from names that the caller has read.

    The user's SLIPWAY_HEAD takes the place of a head that is not told; without it, it is this node if its rank is 0.
    Raises DetectionError if anything else is missing; the hint says where it comes from. Hosts that are not as many as
    the count are left out.
    """
    head = head or reader.host(HEAD)
    nodes = reader.required_number(count, hint=hint)
    node_rank = 0 if nodes == 1 else reader.required_number(rank, hint=hint)
    if head is None and node_rank > 0:
        raise DetectionError(f"{environment} does not name the head of {nodes} nodes", hint=hint)
    if nodes == 1 or head is None:
        head = view.hostname
    return Allocation(
        environment=environment,
        job_id=job_id or head,
        node_count=nodes,
        node_rank=node_rank,
        hosts=tuple(hosts) if hosts and len(hosts) == nodes else None,
        head=head,
        variables=reader.used,
    )
