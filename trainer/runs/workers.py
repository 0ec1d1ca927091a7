"""All workers of a run: which class serves each role, and how they start together."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.cluster.nodes import Slot
from trainer.cluster.place import RankPlace
from trainer.cluster.workers import WorkerGroup, wait
from trainer.config.tree import Config
from trainer.rollout.process_environment import engine_environment

# The order in which a node starts them: engines take longest.
ROLES = {
    "rollout": "trainer.roles.rollout.RolloutWorker",
    "actor": "trainer.roles.actor.ActorWorker",
    "critic": "trainer.roles.critic.CriticWorker",
    "reference": "trainer.roles.reference.ReferenceWorker",
    "reward": "trainer.roles.reward.RewardWorker",
}
# What Ray is told: all roles of a slot fit on its GPU. Rewards by rule alone use none.
GPU_SHARES = dict.fromkeys(ROLES, 1 / len(ROLES))


# The slots of each role, in the order of its ranks.
Placement = Mapping[str, Sequence[Slot]]


@dataclass(frozen=True)
class Workers:
    """The groups of a run; None for a role that its algorithm does without. An actor with adapters is the reference,
    too. `on_shared_gpus` says that engines and actor have the same GPUs: weights stay on them, and engines make room
    while others train."""

    rollout: WorkerGroup
    actor: WorkerGroup
    reward: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    on_shared_gpus: bool

    @property
    def trained(self) -> list[WorkerGroup]:
        """Those that take optimizer steps and belong in a checkpoint."""
        return [self.actor, self.critic] if self.critic else [self.actor]

    @property
    def networks(self) -> list[WorkerGroup]:
        """Those that hold a network, each a process group of its own."""
        return [*self.trained, self.reference] if self.reference not in (None, self.actor) else self.trained


def roles_of(config: Config) -> list[str]:
    """The roles that the algorithm needs."""
    unneeded = {
        "critic": not config.needs_critic,
        "reference": not config.needs_reference or config.actor_is_reference,
    }
    return [role for role in ROLES if not unneeded.get(role)]


def start_workers(config: Config, placement: Placement) -> Workers:
    """Starts a worker of each role in each of its slots; see `start_groups`."""
    groups = start_groups(config, placement)
    return Workers(
        groups["rollout"],
        groups["actor"],
        groups["reward"],
        groups.get("critic"),
        groups.get("reference", groups["actor"] if config.needs_reference else None),
        on_shared_gpus=placement["actor"][0].device == "cuda"
        and list(placement["rollout"]) == list(placement["actor"]),
    )


def start_groups(config: Config, placement: Placement) -> dict[str, WorkerGroup]:
    """Starts a worker of each role in each of its slots; returns at once, while they import what they need."""
    settings = config.trainer
    groups = {role: WorkerGroup(role, settings.worker_timeout, settings.bind_cores) for role in placement}
    for role, slots in placement.items():
        for rank, slot in enumerate(slots):
            place = RankPlace(rank, len(slots), slot.node.address, slot.device)
            engines = config.rollout.engines_per_gpu if role == "rollout" and place.device == "cuda" else 1
            for _ in range(engines):
                share = GPU_SHARES[role] / engines if role != "reward" or config.reward.model.path else 0.0
                groups[role].add(slot, ROLES[role], [config, place], worker_environment(config, slot), share)
    return groups


def worker_environment(config: Config, slot: Slot) -> dict[str, str]:
    """The variables to set in a worker's process before it imports torch."""
    return {
        **engine_environment(config.rollout.eager_on(slot.device)),
        # Ray gives a worker a single thread. The roles of a node take turns, so each may use all its cores,
        "OMP_NUM_THREADS": str(slot.threads),
        # but threads that spin while they wait would take them from the role whose turn it is: measured 3 to 5 times
        # slower with two processes of two threads each on two cores.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def connect_ranks(training: Sequence[WorkerGroup], placement: Placement, run_dir: Path, timeout: float) -> None:
    """Makes one process group of each training role and builds its network; all roles at the same time."""
    ports = wait([group.start_each("open_store", [()])[0] for group in training], timeout)
    setups = [
        group.start("setup", placement[group.role][0].node.address, port, run_dir)
        for group, port in zip(training, ports, strict=True)
    ]
    wait([call for calls in setups for call in calls], timeout)
