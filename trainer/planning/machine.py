"""A plan without a cluster, for GPUs that need not be on this machine."""

import os

from ray.util.placement_group import PlacementGroup

from trainer.cluster.device_memory import device_count, device_memory
from trainer.cluster.nodes import ClusterNode, numbered_slots
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.models.files import check_models, with_local_models
from trainer.planning.placement import roles_of
from trainer.planning.plan import Plan, plan_of


def plan_without_cluster(
    config: Config, nodes: int | None, gpus: int | None, gpu_gib: float | None, node_gib: float | None = None
) -> Plan:
    """The plan for nodes of `gpus` GPUs with `gpu_gib` GiB each and `node_gib` of their own, or for what this machine
    has.

    Raises ConfigError if the GPUs' memory is not known, or if batches or models do not fit.
    """
    config = with_local_models(config)
    check_models(config)
    settings = config.trainer
    count = nodes or settings.nnodes or 1
    per_node = next(number for number in (gpus, settings.n_gpus_per_node, device_count()) if number is not None)
    memory = gpu_gib or device_memory("cuda" if per_node else "cpu")
    if memory is None:
        raise ConfigError("the memory of the GPUs is unknown on this machine", hint="pass --gpu-gib, like --gpu-gib 80")
    if node_gib is None and nodes is gpus is gpu_gib is None:
        node_gib = device_memory("cpu")
    named = (f"node{at}" for at in range(count))
    assumed = [ClusterNode(name, name, os.cpu_count() or 1, per_node, memory, node_gib) for name in named]
    slots = numbered_slots(assumed, per_node, PlacementGroup.empty())
    return plan_of(config, slots, roles_of(config))
