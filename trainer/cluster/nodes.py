"""The nodes of a Ray cluster, and the slots that a run reserves on them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from trainer.errors import ConfigError, WorkerError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterNode:
    """A node of the Ray cluster, with the resources that Ray reports.

    `device_gib` is the memory of each of its GPUs, the least if they differ, or of the node if it trains on CPU, and
    `node_gib` the node's own that is left beside Ray's object store; None if unknown.
    """

    id: str
    address: str
    cpus: int
    gpus: int
    device_gib: float | None = None
    node_gib: float | None = None


def find_nodes(count: int | None, gpus_per_node: int | None) -> list[ClusterNode]:
    """The nodes of the cluster to use: this one first, then the others by address. See `choose_nodes`."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [
        ClusterNode(
            id=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            cpus=int(entry["Resources"].get("CPU", 0)),
            gpus=int(entry["Resources"].get("GPU", 0)),
            node_gib=entry["Resources"]["memory"] / 2**30 if "memory" in entry["Resources"] else None,
        )
        for entry in ray.nodes()
        if entry["Alive"]
    ]
    return choose_nodes(sorted(nodes, key=lambda node: (node.id != here, node.address, node.id)), count, gpus_per_node)


def choose_nodes(nodes: Sequence[ClusterNode], count: int | None, gpus_per_node: int | None) -> list[ClusterNode]:
    """The first `count` nodes, or all. A first node without GPUs only drives the run if others have some.

    Raises ConfigError if there are fewer, or if a node has fewer GPUs than `gpus_per_node` (without that, than the
    first).
    """
    nodes = list(nodes)
    if gpus_per_node != 0 and nodes[0].gpus == 0 and any(node.gpus for node in nodes):
        logger.info("%s has no GPUs: it drives the run, and trains nothing", nodes[0].address)
        nodes = nodes[1:]
    if count is not None and count > len(nodes):
        raise ConfigError(
            f"trainer.nnodes={count}, but the cluster has {len(nodes)}: {', '.join(node.address for node in nodes)}",
            hint="start the missing nodes, or lower trainer.nnodes",
        )
    nodes = nodes[:count]
    wanted = nodes[0].gpus if gpus_per_node is None else gpus_per_node
    for node in nodes:
        if node.gpus < wanted:
            raise ConfigError(
                f"{node.address} has {node.gpus} GPUs, every node needs {wanted}",
                hint="lower trainer.n_gpus_per_node to the number that every node has; 0 trains on CPU",
            )
    return nodes


@dataclass(frozen=True)
class Slot:
    """A place for one rank of every role: a GPU, or a whole node if there are no GPUs.

    It is slot `local_rank` of the `local_size` slots on its node. `device` is cpu or cuda.
    """

    rank: int
    node: ClusterNode
    device: str
    local_rank: int
    local_size: int
    group: PlacementGroup

    @property
    def threads(self) -> int:
        """An equal share of the node's cores."""
        return max(1, self.node.cpus // self.local_size)


def reserve_slots(nodes: Sequence[ClusterNode], gpus_per_node: int, timeout: float) -> list[Slot]:
    """Reserves one slot per GPU, or one per node without GPUs, and numbers them node by node.

    Raises WorkerError if Ray has not reserved them within `timeout` seconds.
    """
    owners = [node.id for node in nodes for _ in range(gpus_per_node or 1)]
    resources = {"CPU": 1, "GPU": 1} if gpus_per_node else {"CPU": 1}
    group = placement_group([resources] * len(owners), bundle_label_selector=[{"ray.io/node-id": id} for id in owners])
    if not group.wait(timeout):
        raise WorkerError(
            f"Ray did not reserve {resources} for each of {len(owners)} ranks within {timeout:g} s",
            hint="other work may be using this Ray cluster; see `ray status`",
        )
    return numbered_slots(nodes, gpus_per_node, group)


def numbered_slots(nodes: Sequence[ClusterNode], gpus_per_node: int, group: PlacementGroup) -> list[Slot]:
    """A slot per GPU, or one per node without GPUs, numbered node by node."""
    per_node, device = gpus_per_node or 1, "cuda" if gpus_per_node else "cpu"
    owners = [node for node in nodes for _ in range(per_node)]
    return [Slot(rank, node, device, rank % per_node, per_node, group) for rank, node in enumerate(owners)]
