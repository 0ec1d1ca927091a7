"""All workers of a run: which class serves each role, and how they start together."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.cluster import Slot, WorkerGroup, wait
from trainer.config import Config
from trainer.roles.place import Place
from trainer.rollout.environment import engine_environment

# The order in which a node starts them: engines take longest.
ROLES = {
    "rollout": "trainer.roles.rollout.RolloutWorker",
    "actor": "trainer.roles.actor.ActorWorker",
    "critic": "trainer.roles.critic.CriticWorker",
    "reference": "trainer.roles.reference.ReferenceWorker",
    "reward": "trainer.roles.reward.RewardWorker",
}
# All but the reward use the GPU of their slot.
GPU_SHARES = {"rollout": 0.25, "actor": 0.25, "critic": 0.25, "reference": 0.25, "reward": 0.0}


@dataclass(frozen=True)
class Workers:
    """The groups of a run; None for a role that its algorithm does without."""

    rollout: WorkerGroup
    actor: WorkerGroup
    reward: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    on_gpus: bool

    @property
    def trained(self) -> list[WorkerGroup]:
        """Those that take optimizer steps and belong in a checkpoint."""
        return [self.actor, self.critic] if self.critic else [self.actor]

    @property
    def networks(self) -> list[WorkerGroup]:
        """Those that hold a network, each a process group of its own."""
        return [*self.trained, self.reference] if self.reference else self.trained


def start_workers(config: Config, slots: list[Slot]) -> Workers:
    """Starts a worker of each role that the algorithm needs in every slot; see `start_groups`."""
    unneeded = {"critic": not config.needs_critic, "reference": not config.needs_reference}
    groups = start_groups(config, slots, [role for role in ROLES if not unneeded.get(role)])
    return Workers(
        groups["rollout"],
        groups["actor"],
        groups["reward"],
        groups.get("critic"),
        groups.get("reference"),
        on_gpus=slots[0].device == "cuda",
    )


def start_groups(config: Config, slots: list[Slot], roles: Sequence[str]) -> dict[str, WorkerGroup]:
    """Starts a worker of each of these roles in every slot; returns at once, while they import what they need."""
    groups = {role: WorkerGroup(role, config.trainer.worker_timeout) for role in roles}
    for slot in slots:
        environment = worker_environment(config, slot)
        place = Place(slot.rank, len(slots), slot.node.address, slot.device)
        for role, group in groups.items():
            engines = config.rollout.engines_per_gpu if role == "rollout" and place.device == "cuda" else 1
            for _ in range(engines):
                group.add(slot, ROLES[role], [config, place], environment, GPU_SHARES[role] / engines)
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


def connect_ranks(training: Sequence[WorkerGroup], slots: list[Slot], run_dir: Path, timeout: float) -> None:
    """Makes one process group of each training role and builds its network; all roles at the same time."""
    ports = wait([group.start_each("open_store", [()])[0] for group in training], timeout)
    setups = [
        group.start("setup", slots[0].node.address, port, run_dir) for group, port in zip(training, ports, strict=True)
    ]
    wait([call for calls in setups for call in calls], timeout)
