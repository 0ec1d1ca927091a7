"""All workers of a run, and how they start together."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from trainer.cluster.calls import wait
from trainer.cluster.device_memory import with_memory
from trainer.cluster.nodes import ClusterNode, Slot, find_nodes, reserve_slots
from trainer.cluster.place import RankPlace, Team
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config, WorkersConfig
from trainer.experience.reward_workers import Scorer
from trainer.planning.placement import ROLES, Placement, engine_slots, on_shared_gpus
from trainer.planning.plan import Plan, plan_of
from trainer.roles.factories import make_actor, make_critic, make_reference, make_reward, make_rollout, make_teacher
from trainer.rollout.engine import check_engine
from trainer.rollout.engines import EngineWorker
from trainer.rollout.vllm.settings import EXACT, engine_environment
from trainer.runs.interfaces import ActorRole, CriticRole, ReferenceRole, TrainedRole, TrainingRole
from trainer.training.determinism import ENVIRONMENT as DETERMINISTIC

C = TypeVar("C", bound=WorkersConfig)
W = TypeVar("W")

# The share of its slot's GPU that Ray reserves for a worker, so that all roles of a slot fit.
GPU_SHARE = 1 / len(ROLES)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingGroups:
    """The roles that hold a network; None for those that the run does without. An actor that trains adapters is its own
    reference."""

    actor: WorkerGroup[ActorRole]
    critic: WorkerGroup[CriticRole] | None
    reference: WorkerGroup[ReferenceRole] | None
    teacher: WorkerGroup[ReferenceRole] | None = None

    @property
    def trained(self) -> list[WorkerGroup[TrainedRole]]:
        """The groups that take optimizer steps and belong in a checkpoint."""
        return [self.actor, self.critic] if self.critic else [self.actor]

    @property
    def all(self) -> list[WorkerGroup[TrainingRole]]:
        """Each group once; each is a process group of its own."""
        reference = None if self.reference is self.actor else self.reference
        return [*self.trained, *(group for group in (reference, self.teacher) if group is not None)]


@dataclass(frozen=True)
class Workers:
    """The groups of a run; engines and rewards are None in a run that learns from files. `on_shared_gpus`: engines and
    actor have the same GPUs, so weights are copied on the GPU, and engines free their memory while other roles
    compute."""

    training: TrainingGroups
    rollout: WorkerGroup[EngineWorker] | None
    reward: WorkerGroup[Scorer] | None
    on_shared_gpus: bool


def start_workers(config: WorkersConfig, placement: Placement) -> Workers:
    """Starts a worker of each role in each of its slots; returns at once, while they import what they need."""
    if not isinstance(config, Config):
        return Workers(start_training(config, placement), None, None, on_shared_gpus=False)
    rollout = start_engines(make_rollout, config, placement["rollout"])  # first: engines take longest to start
    training = start_training(config, placement)
    reward = start_group("reward", make_reward, config, placement)
    return Workers(training, rollout, reward, on_shared_gpus(placement))


def start_training(config: WorkersConfig, placement: Placement) -> TrainingGroups:
    """Starts the workers of actor, critic, reference and teacher, each if it has slots; returns at once."""
    policy, critics = (section.sharding.ranks_per_data_group for section in (config.actor, config.critic))
    actor: WorkerGroup[ActorRole] = start_group("actor", make_actor, config, placement, policy)
    critic = start_group("critic", make_critic, config, placement, critics) if "critic" in placement else None
    reference: WorkerGroup[ReferenceRole] | None = actor if config.needs_reference else None
    if "reference" in placement:
        reference = start_group("reference", make_reference, config, placement, policy)
    teacher = start_group("teacher", make_teacher, config, placement, policy) if "teacher" in placement else None
    return TrainingGroups(actor, critic, reference, teacher)


def start_group(
    role: str,
    make: Callable[[C, RankPlace], W],
    config: C,
    placement: Placement,
    ranks_per_data_group: int = 1,
) -> WorkerGroup[W]:
    """Starts the workers of one role; returns at once."""
    settings, slots = config.trainer, placement[role]
    group = WorkerGroup[W](role, settings.worker_timeout, settings.bind_cores, ranks_per_data_group)
    for place, slot in zip(rank_places(slots), slots, strict=True):
        # Rewards by rule alone use no GPU.
        share = GPU_SHARE if role != "reward" or config.reward.model.path else 0.0
        group.add(slot, partial(make, config, place), worker_environment(config, slot), share)
    return group


def rank_places(slots: Sequence[Slot]) -> list[RankPlace]:
    """The ranks of a role's workers, of which each slot has one."""
    on_node = Counter(slot.node for slot in slots)
    earlier: Counter[ClusterNode] = Counter()
    places = []
    for rank, slot in enumerate(slots):
        local = (earlier[slot.node], on_node[slot.node])
        places.append(RankPlace(rank, len(slots), slot.node.address, slot.device, *local))
        earlier[slot.node] += 1
    return places


def start_engines(
    make: Callable[[Config, RankPlace, Team], W], config: Config, slots: Sequence[Slot]
) -> WorkerGroup[W]:
    """Starts the workers of all engines, a team per engine; returns at once."""
    group = WorkerGroup[W]("rollout", config.trainer.worker_timeout, config.trainer.bind_cores)
    engines = engine_slots(config, slots)
    per_slot = config.rollout.engines_per_gpu if slots[0].device == "cuda" else 1
    for number, team in enumerate(engines):
        place = RankPlace(number, len(engines), team[0].node.address, team[0].device)
        processes = team.count(team[0])  # of this engine on one device
        environment = worker_environment(config, team[0], processes) | (EXACT if config.is_exact else {})
        for _ in range(per_slot):
            group.add_team(team, partial(make, config, place), environment, GPU_SHARE / per_slot)
    return group


def worker_environment(config: WorkersConfig, slot: Slot, at_once: int = 1) -> dict[str, str]:
    """The variables to set in a worker's process before it imports torch; `at_once` such processes compute together."""
    return {
        **engine_environment(config.rollout.eager_on(slot.device)),
        **(DETERMINISTIC if config.trainer.deterministic and slot.device == "cuda" else {}),
        # Ray gives a worker a single thread. The roles of a node take turns, so each may use all its cores,
        "OMP_NUM_THREADS": str(max(1, slot.threads // at_once)),
        # but waiting threads must not spin: they would take cores from the role whose turn it is. Measured: 3 to 5
        # times slower, with two processes of two threads each on two cores.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def connect_ranks(groups: Sequence[WorkerGroup[TrainingRole]], run_dir: Path, run_steps: int, timeout: float) -> None:
    """Connects the ranks of each group in a process group and builds its network; all groups at the same time.

    `run_steps` is the number of steps of the run, over which learning rates decay.
    """
    ports = wait([group.start_one(0, TrainingRole.open_store) for group in groups], timeout)
    setups = [
        group.start(TrainingRole.setup, group.workers[0].spec.slot.node.address, port, run_dir, run_steps)
        for group, port in zip(groups, ports, strict=True)
    ]
    notes = wait([call for calls in setups for call in calls], timeout)
    for note in dict.fromkeys(note for of_rank in notes for note in of_rank):
        logger.info("%s", note)


def find_plan(config: WorkersConfig, roles: Sequence[str]) -> Plan:
    """The plan of a run on the nodes of the cluster, logged.

    Raises ConfigError if batches or models do not fit.
    """
    if isinstance(config, Config):
        check_engine(config)
    settings = config.trainer
    nodes = find_nodes(settings.nnodes, settings.n_gpus_per_node)
    gpus = nodes[0].gpus if settings.n_gpus_per_node is None else settings.n_gpus_per_node
    nodes = with_memory(nodes, "cuda" if gpus else "cpu", settings.worker_timeout)
    slots = reserve_slots(nodes, gpus, settings.worker_timeout)
    plan = plan_of(config, slots, roles)
    for line in plan.lines():
        logger.info("%s", line)
    return plan
