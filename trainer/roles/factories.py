"""Makes a worker of each role. The controller sends these functions to the workers' processes.

Imports are inside: only the worker's own process imports torch and vLLM, after its environment is set.
"""

from typing import TYPE_CHECKING

from trainer.cluster.place import RankPlace, Team
from trainer.config.tree import Config, WorkersConfig

if TYPE_CHECKING:
    from trainer.roles.actor import ActorWorker
    from trainer.roles.critic import CriticWorker
    from trainer.roles.reference import ReferenceWorker, TeacherWorker
    from trainer.roles.reward import RewardWorker
    from trainer.roles.rollout import RolloutWorker


def make_rollout(config: Config, place: RankPlace, team: Team) -> "RolloutWorker":
    from trainer.roles.rollout import RolloutWorker

    return RolloutWorker(config, place, team)


def make_actor(config: WorkersConfig, place: RankPlace) -> "ActorWorker":
    from trainer.roles.actor import ActorWorker

    return ActorWorker(config, place)


def make_critic(config: WorkersConfig, place: RankPlace) -> "CriticWorker":
    from trainer.roles.critic import CriticWorker

    return CriticWorker(config, place)


def make_reference(config: WorkersConfig, place: RankPlace) -> "ReferenceWorker":
    from trainer.roles.reference import ReferenceWorker

    return ReferenceWorker(config, place)


def make_teacher(config: WorkersConfig, place: RankPlace) -> "TeacherWorker":
    from trainer.roles.reference import TeacherWorker

    return TeacherWorker(config, place)


def make_reward(config: Config, place: RankPlace) -> "RewardWorker":
    from trainer.roles.reward import RewardWorker

    return RewardWorker(config, place)
