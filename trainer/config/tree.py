"""Every setting of a run as one typed tree, and the rules between its sections."""

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from trainer.algorithms.off_policy.treatment import OffPolicyCorrection
from trainer.algorithms.registry import POLICY_LOSSES
from trainer.config.section import Section
from trainer.config.sections.algorithm import AlgorithmConfig
from trainer.config.sections.data import DataConfig
from trainer.config.sections.device_mapping import DeviceMappingConfig
from trainer.config.sections.distillation import DistillationConfig
from trainer.config.sections.model import ModelConfig
from trainer.config.sections.reward import RewardConfig
from trainer.config.sections.roles import ActorConfig, CriticConfig, ReferenceConfig
from trainer.config.sections.rollout import RolloutConfig, ValidationConfig
from trainer.config.sections.trainer import TrainerConfig
from trainer.config.sections.watchdogs import WatchdogsConfig


class RunConfig(Section):
    """The settings that every kind of run has. `command` starts such a run."""

    command: ClassVar[str] = "train"
    model: ModelConfig = ModelConfig()
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)

    @property
    def notes(self) -> list[str]:
        """Notes for the user on unusual combinations of settings."""
        return []


class WorkersConfig(RunConfig):
    """What planning, models and workers read of the settings of a run, whatever it learns from."""

    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    distillation: DistillationConfig = DistillationConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    watchdogs: WatchdogsConfig = WatchdogsConfig()
    device_mapping: DeviceMappingConfig = DeviceMappingConfig()

    @property
    def needs_critic(self) -> bool:
        """Whether a critic learns beside the actor."""
        raise NotImplementedError

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs log-probs of the reference policy."""
        raise NotImplementedError

    @property
    def responses_per_prompt(self) -> int:
        """Rows of a step that share their prompt."""
        raise NotImplementedError

    @property
    def longest_row(self) -> tuple[int, int]:
        """Most tokens of a row's prompt, and of its response."""
        return self.data.max_prompt_length, self.data.max_response_length

    @property
    def corrects_in_update(self) -> OffPolicyCorrection | None:
        """What corrects for the engines during an update; None if the batch holds what does."""
        return None

    @property
    def responses(self) -> int:
        """Rows per step."""
        return self.data.train_batch_size * self.responses_per_prompt

    def planned_steps(self, rows: int) -> int:
        """Steps that schedules span: `trainer.total_steps`, or the whole batches in all epochs of so many rows."""
        return self.trainer.total_steps or self.data.batches(rows, self.trainer.total_epochs)

    def steps(self, rows: int) -> int:
        """Steps of a run on so many rows."""
        planned = self.planned_steps(rows)
        last = self.data.batches(rows, self.trainer.total_epochs)
        return min(planned, last) if self.trainer.stop_after_epochs else planned

    @property
    def is_exact(self) -> bool:
        """Whether engines and actor compute log-probs by the same operators, equal to the bit."""
        return self.actor.backend == "exact"

    @property
    def loads_in_parts(self) -> bool:
        """Whether an engine can take its weights some at a time; it takes adapters, and what it quantises, at once."""
        return not self.engines_apply_adapters and self.rollout.quantization is None

    @property
    def engines_apply_adapters(self) -> bool:
        """Whether engines hold the frozen weights and get adapters alone; else all weights, with adapters merged in."""
        return self.actor.lora.rank > 0 and self.rollout.lora == "adapters"

    @property
    def actor_is_reference(self) -> bool:
        """Whether the actor without its adapters serves as the reference."""
        return self.actor.lora.rank > 0

    @property
    def trained(self) -> dict[str, ActorConfig | CriticConfig]:
        """The settings of each role that takes optimizer steps."""
        return {"actor": self.actor, "critic": self.critic} if self.needs_critic else {"actor": self.actor}

    def check_ranks(self, ranks: Mapping[str, int]) -> None:
        """Raises ConfigError if the sharding of a role cannot divide its ranks."""
        for role, section in self.trained.items():
            section.sharding.check_ranks(role, role, ranks[role])
        for role in ("reference", "teacher") if self.needs_reference else ("teacher",):
            if role in ranks:
                self.actor.sharding.check_ranks("actor", role, ranks[role])


class Config(WorkersConfig):
    """The settings of a PPO run."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    validation: ValidationConfig = ValidationConfig()

    @property
    def responses_per_prompt(self) -> int:
        return self.rollout.samples_per_prompt

    @property
    def corrects_in_update(self) -> OffPolicyCorrection | None:
        return self.algorithm.off_policy if self.algorithm.old_log_probs == "engine" else None

    @property
    def needs_critic(self) -> bool:
        """Whether the advantage estimator uses a critic."""
        return self.algorithm.estimator.needs_critic

    @property
    def needs_reference(self) -> bool:
        """Whether the run needs log-probs of the reference policy."""
        in_reward = self.algorithm.kl_coefficient > 0 and not self.distillation.replaces_rewards
        return in_reward or self.actor.kl_loss_coefficient > 0

    @property
    def engines_know_old_log_probs(self) -> bool:
        """Whether the engines' log-probs are those of the policy before the update."""
        return self.is_exact or self.algorithm.old_log_probs == "engine"

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether every step needs the engines' log-probs, for more than a comparison."""
        algorithm, acts = self.algorithm, self.watchdogs.ratio_drift.action not in ("off", "log")
        corrects = algorithm.correction != "none" or bool(algorithm.rejection)
        return self.engines_know_old_log_probs or corrects or acts or self.trainer.trajectories.per_token

    def has_rollout_log_probs(self, step: int) -> bool:
        """Whether the engines return log-probs of a step's responses."""
        freq = self.rollout.compare_freq
        return self.needs_rollout_log_probs or (freq > 0 and (step - 1) % freq == 0)

    def needs_old_log_probs(self, step: int) -> bool:
        """Whether log-probs of the sampling policy are computed before a step's update.

        A single optimizer step computes them anyway, but a KL in the reward and the comparison with the engines need
        them earlier.
        """
        if self.engines_know_old_log_probs:
            return False
        single_step = self.actor.ppo_epochs == 1 and self.actor.mini_batch_size == self.responses
        needed = self.algorithm.kl_coefficient > 0 or self.algorithm.estimator.needs_squared_probabilities
        return not single_step or needed or self.has_rollout_log_probs(step)

    @property
    def notes(self) -> list[str]:
        """Notes for the user on unusual combinations of settings."""
        notes = []
        if self.rollout.samples_per_prompt == 1 and self.algorithm.estimator.compares_groups:
            notes.append(
                f"rollout.samples_per_prompt=1: algorithm.advantage={self.algorithm.advantage} compares the responses "
                "to a prompt, so with one the advantage is the raw score"
            )
        if self.algorithm.correction_normalize and self.algorithm.old_log_probs == "engine":
            notes.append(
                "algorithm.correction_normalize: algorithm.old_log_probs=engine divides weights by their mean over a "
                "micro-batch"
            )
        return notes

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        algorithm, samples = self.algorithm, self.rollout.samples_per_prompt
        smallest = 2 if algorithm.dynamic_sampling else algorithm.estimator.smallest_group
        if samples < smallest:
            dynamic = algorithm.dynamic_sampling
            wants = "algorithm.dynamic_sampling=true" if dynamic else f"algorithm.advantage={algorithm.advantage}"
            raise ValueError(
                f"{wants} compares responses to the same prompt: set rollout.samples_per_prompt to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        """Every optimizer step uses equally many responses, and none is left over."""
        for role, section in self.trained.items():
            if self.responses % section.mini_batch_size:
                largest = min(section.mini_batch_size, self.responses)
                fitting = next(size for size in range(largest, 0, -1) if self.responses % size == 0)
                raise ValueError(
                    f"{role}.mini_batch_size={section.mini_batch_size} does not divide the {self.responses} responses "
                    f"of a step (data.train_batch_size x rollout.samples_per_prompt): set it to {fitting}"
                )
        return self

    @model_validator(mode="after")
    def _samples_of_another_policy_are_corrected(self) -> Self:
        if self.algorithm.old_log_probs == "engine" or "correction" in self.algorithm.model_fields_set:
            return self
        cause = ""
        if self.trainer.mode != "synchronous":
            cause = f"trainer.mode={self.trainer.mode} learns from an older policy"
        elif self.rollout.quantization is not None:
            cause = f"rollout.quantization={self.rollout.quantization} samples from another policy than the actor's"
        if cause:
            raise ValueError(f"{cause}: set algorithm.correction, or algorithm.correction=none to go without")
        return self

    @model_validator(mode="after")
    def _drafts_can_be_verified(self) -> Self:
        for name, section in (("rollout", self.rollout), ("validation", self.validation)):
            if self.rollout.speculative_tokens and section.min_p:
                raise ValueError(f"rollout.speculative_tokens does not support {name}.min_p, because vLLM does not")
        return self

    @model_validator(mode="after")
    def _segments_need_no_whole_batches(self) -> Self:
        if self.trainer.mode != "asynchronous":
            return self
        if self.rollout.stop:
            raise ValueError(
                "trainer.mode=asynchronous does not support rollout.stop: a stop text may lie on both sides of a "
                "segment's end"
            )
        algorithm = self.algorithm
        if algorithm.dynamic_sampling or algorithm.estimator.needs_greedy_responses:
            name = "dynamic_sampling" if algorithm.dynamic_sampling else f"advantage={algorithm.advantage}"
            raise ValueError(f"trainer.mode=asynchronous does not support algorithm.{name}, which needs whole batches")
        return self

    @model_validator(mode="after")
    def _rewards_have_an_effect(self) -> Self:
        algorithm, buffer, longest = self.algorithm, self.reward.overlong_buffer, self.data.max_response_length
        if buffer > longest:
            raise ValueError(f"reward.overlong_buffer={buffer} exceeds data.max_response_length={longest}")
        if algorithm.estimator.needs_components and (algorithm.kl_coefficient > 0 or buffer > 0):
            name = "reward.overlong_buffer" if buffer > 0 else "algorithm.kl_coefficient"
            raise ValueError(
                f"{name} has no effect with algorithm.advantage={algorithm.advantage}, which reads the components of "
                f"the reward alone: set {name}=0"
            )
        return self

    @model_validator(mode="after")
    def _there_is_a_critic_to_warm_up(self) -> Self:
        if self.trainer.critic_warmup and not self.needs_critic:
            raise ValueError(f"trainer.critic_warmup: algorithm.advantage={self.algorithm.advantage} has no critic")
        return self

    @model_validator(mode="after")
    def _same_bits_are_possible(self) -> Self:
        if not self.trainer.deterministic:
            return self
        if self.trainer.mode == "asynchronous":
            raise ValueError(
                "trainer.deterministic does not support trainer.mode=asynchronous, where timing decides which weights "
                "sample a token: set trainer.mode=one_step_off or synchronous"
            )
        if self.rollout.weight_transfer == "broadcast":
            raise ValueError(
                "trainer.deterministic does not support rollout.weight_transfer=broadcast, because vLLM then sets NCCL "
                "up in another way than the actor: leave it out"
            )
        if self.rollout.speculative_tokens:
            raise ValueError(
                "trainer.deterministic does not support rollout.speculative_tokens: kernels round differently when a "
                "step verifies several tokens"
            )
        return self

    @model_validator(mode="after")
    def _log_probs_can_be_exact(self) -> Self:
        if not self.is_exact:
            return self
        algorithm, rollout, actor = self.algorithm, self.rollout, self.actor
        refused = {
            f"trainer.mode={self.trainer.mode}": self.trainer.mode != "synchronous",
            "rollout.engine=transformers": rollout.engine == "transformers",
            f"rollout.quantization={rollout.quantization}": rollout.quantization is not None,
            f"rollout.speculative_tokens={rollout.speculative_tokens}": rollout.speculative_tokens > 0,
            f"rollout.tensor_parallel={rollout.tensor_parallel}": rollout.tensor_parallel > 1,
            "rollout.top_p, top_k or min_p": (rollout.top_p, rollout.top_k, rollout.min_p) != (1.0, None, 0.0),
            f"algorithm.correction={algorithm.correction}": algorithm.correction != "none",
            "algorithm.rejection": bool(algorithm.rejection),
            f"actor.sharding.tensor_parallel={actor.sharding.tensor_parallel}": actor.sharding.tensor_parallel > 1,
            f"actor.sharding.context_parallel={actor.sharding.context_parallel}": actor.sharding.context_parallel > 1,
            f"model.dtype={self.model.dtype}": self.model.dtype not in (None, "bfloat16"),
        }
        if conflicts := [setting for setting, given in refused.items() if given]:
            raise ValueError(
                f"actor.backend=exact, whose log-probs equal the engines', does not support {' and '.join(conflicts)}: "
                "leave it out, or set actor.backend=fsdp"
            )
        return self

    @model_validator(mode="after")
    def _the_gap_to_the_engines_is_corrected_once(self) -> Self:
        algorithm = self.algorithm
        if algorithm.old_log_probs == "trainer":
            return self
        if algorithm.correction != "none" and POLICY_LOSSES[self.actor.policy_loss].uses_ratio:
            raise ValueError(
                f"algorithm.old_log_probs=engine: the ratio of actor.policy_loss={self.actor.policy_loss} already "
                "corrects for the engine: set algorithm.correction=none, or actor.policy_loss=gpg"
            )
        return self

    @model_validator(mode="after")
    def _recorded_experts_can_be_had(self) -> Self:
        replay = f"actor.router_replay={self.actor.router_replay}"
        if self.actor.router_replay == "recompute" and self.engines_know_old_log_probs:
            raise ValueError(
                f"{replay}: no pass for old log-probs records experts with algorithm.old_log_probs=engine: set "
                "actor.router_replay=engine"
            )
        if self.actor.router_replay == "engine" and self.trainer.mode != "synchronous":
            raise ValueError(
                f"{replay} does not support trainer.mode={self.trainer.mode}: a checkpoint keeps responses sampled "
                "ahead without their experts: set actor.router_replay=recompute, or trainer.mode=synchronous"
            )
        return self

    @model_validator(mode="after")
    def _roll_backs_have_somewhere_to_go(self) -> Self:
        dogs = self.watchdogs
        named = (dogs.reward_deviation, dogs.kl, dogs.entropy, dogs.ratio_drift, dogs.memory_growth)
        if any(dog.action == "roll_back" for dog in named) and self.trainer.save_freq < 1:
            raise ValueError("a watchdog with action=roll_back needs checkpoints: set trainer.save_freq to 1 or more")
        return self
