"""Every setting of a PPO run: one typed tree, defaults and documentation in one place."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trainer.config.custom_code import CustomCode as CustomCode
from trainer.config.device_mapping import DeviceMappingConfig
from trainer.config.lora import LoraConfig
from trainer.config.modules import module_names
from trainer.config.profiler import ProfilerConfig
from trainer.config.reward import RewardConfig as RewardConfig
from trainer.config.rollout import RolloutConfig as RolloutConfig
from trainer.config.rows import Row, find_rows
from trainer.config.section import Section
from trainer.config.sharding import ShardingConfig
from trainer.config.watchdogs import WatchdogsConfig
from trainer.errors import ConfigError

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[module_names("models/backends")]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]
KlEstimator = Literal["k1", "k2", "k3"]


if TYPE_CHECKING:
    LoggerName = str
else:
    LoggerName = Literal[tuple(find_rows("trainer.records.loggers", Row))]


class DataConfig(Section):
    train_files: list[Path] = Field([], description="parquet files with the training prompts")
    validation_files: list[Path] = Field([], description="parquet files with the held-out prompts")
    train_batch_size: int = Field(64, gt=0, description="prompts per step")
    max_prompt_length: int = Field(64, gt=0, description="tokens; see overlong_prompts for a longer prompt")
    overlong_prompts: Literal["error", "filter", "truncate_left", "truncate_right"] = Field(
        "error", description="refuse a longer prompt, leave it out, or keep its last or its first tokens"
    )
    max_response_length: int = Field(16, gt=0, description="tokens generated at most per response")
    prompt_key: str = Field("prompt", description="column with the messages of the prompt")
    shuffle: bool = Field(True, description="draw the prompts of each epoch in a new order")
    cache_dir: Path | None = Field(
        None, description="where tokenised prompts are kept for the next run, as in /dev/shm/slipway; null: nowhere"
    )
    custom_cls: CustomCode = Field(
        CustomCode(), description="a dataset class of one's own: (files, tokenizer, data settings) -> prompts"
    )


class ModelConfig(Section):
    path: Path | None = Field(None, description="directory of a Transformers causal language model with its tokenizer")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="type of activations and of the engines' weights; trained weights stay float32. "
        "float16 scales the loss",
    )

    pad_token: str | None = Field(None, description="for a tokenizer that names none: the token of its that pads")

    @property
    def directory(self) -> Path:
        """`path`, which a run cannot do without. Raises ConfigError if it is not set."""
        if self.path is None:
            raise ConfigError("model.path is not set", hint="set model.path=DIRECTORY of a model with its tokenizer")
        return self.path


class TrainedModelConfig(Section):
    """What actor and critic have in common."""

    micro_batch_size: int = Field(64, gt=0, description="responses per forward pass and rank")
    micro_batch_tokens: int | None = Field(
        None, gt=0, description="tokens per forward pass and rank; sets micro_batch_size aside, and suits GPUs"
    )
    activation_checkpointing: bool = Field(
        False, description="keep only the layers' inputs for the backward pass: less memory, a third more computing"
    )
    compile: bool = Field(True, description="compile the layers, on GPUs only")
    activation_memory_budget: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of what the backward pass needs that compiled layers keep. They compute again what is "
        "cheap: at 0.9 what lies between matrix products, a third of all, further down matrix products, too",
    )
    backend: BackendName = Field(
        "fsdp",
        description="whose layers compute: fsdp: Transformers'; megatron: Megatron-Core's, where it is installed. "
        "FSDP2 shards the weights of either",
    )
    sharding: ShardingConfig = ShardingConfig()
    lora: LoraConfig = LoraConfig()

    @model_validator(mode="after")
    def _adapters_are_not_split(self) -> Self:
        if self.lora.rank and self.sharding.tensor_parallel > 1:
            raise ValueError("adapters cannot be split: set lora.rank=0, or sharding.tensor_parallel=1")
        return self


class ActorConfig(TrainedModelConfig):
    learning_rate: float = Field(1e-6, gt=0, description="of AdamW; 1e-6 suits models of some billion parameters")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW, per step and unit of learning rate")
    max_gradient_norm: float = Field(1.0, gt=0, description="L2 norm to which gradients are clipped")
    ppo_epochs: int = Field(1, gt=0, description="passes over each batch")
    mini_batch_size: int = Field(128, gt=0, description="responses per optimizer step, over all ranks")
    policy_loss: Literal["ppo", "gspo", "cispo"] = Field("ppo", description="see trainer/algorithms/policy_loss.py")
    clip_ratio: float = Field(0.2, gt=0, description="epsilon of the clipped policy loss, downwards and upwards")
    clip_ratio_low: float | None = Field(None, gt=0, description="epsilon downwards; clip_ratio when not given")
    clip_ratio_high: float | None = Field(None, gt=0, description="epsilon upwards; clip_ratio when not given")
    clip_dual: float | None = Field(3.0, gt=1, description="largest ratio that counts where the advantage is negative")
    loss_aggregation: Aggregation = Field("token-mean", description="how losses of tokens become one loss")
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of the entropy bonus in the loss")
    kl_loss_coefficient: float = Field(0.0, ge=0, description="weight of the KL to the reference in the loss; 0: none")
    kl_loss_estimator: KlEstimator = Field("k3", description="value of that KL")
    kl_loss_unbiased: bool = Field(True, description="take the gradient of k2, which is the KL's, for any estimator")

    @property
    def clip_low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class CriticConfig(TrainedModelConfig):
    path: Path | None = Field(None, description="model to start from; the actor's when not given")
    learning_rate: float = Field(1e-5, gt=0, description="of AdamW; ten times the actor's is usual")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW, per step and unit of learning rate")
    max_gradient_norm: float = Field(1.0, gt=0, description="L2 norm to which gradients are clipped")
    ppo_epochs: int = Field(1, gt=0, description="passes over each batch")
    mini_batch_size: int = Field(128, gt=0, description="responses per optimizer step, over all ranks")
    clip_range_value: float | None = Field(
        0.5, gt=0, description="how far a value may move from its old one within a step; null: as far as it likes"
    )
    loss_aggregation: Aggregation = Field("token-mean", description="how losses of tokens become one loss")


class ReferenceConfig(Section):
    """The reference; all else is as for the actor."""

    param_offload: bool = Field(
        False, description="weights lie in the node's memory while the reference waits for its turn; on GPUs only"
    )


class AlgorithmConfig(Section):
    advantage: Literal["gae", "grpo", "rloo", "reinforce_plus_plus", "remax"] = Field(
        "gae", description="estimator of advantages; only gae needs a critic"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(1.0, ge=0, le=1, description="lambda of generalised advantage estimation")
    kl_coefficient: float = Field(0.01, ge=0, description="weight of the KL to the reference, taken off the reward")
    kl_estimator: KlEstimator = Field("k1", description="estimate of the KL in the reward")
    kl_control: Literal["fixed", "adaptive"] = Field(
        "fixed", description="adaptive: the coefficient follows the measured KL towards kl_target"
    )
    kl_target: float = Field(0.1, gt=0, description="KL per token that adaptive control aims at")
    kl_horizon: int = Field(10_000, gt=0, description="responses over which adaptive control acts")
    whiten_advantages: bool = Field(True, description="gae: mean 0 and variance 1 over the batch's tokens")
    divide_by_std: bool = Field(True, description="grpo: divide by the group's standard deviation; false is Dr. GRPO")
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = Field(
        "none", description="weights against the gap between engine and trainer; see trainer/algorithms/corrections.py"
    )
    correction_low: float = Field(0.5, ge=0, description="smallest ratio trainer / engine that counts")
    correction_high: float = Field(2.0, gt=0, description="largest ratio trainer / engine that counts")
    dynamic_sampling: bool = Field(
        False, description="draw prompts until a batch is full of those whose responses differ in score (DAPO)"
    )
    max_sampling_rounds: int = Field(
        10, gt=0, description="batches drawn at most for one step; what is then missing is filled with other prompts"
    )


class TrainerConfig(Section):
    output_dir: Path = Field(Path("runs"), description="where the run's directory is made")
    run_id: str | None = Field(None, description="name of the run's directory; the start time when not given")
    nnodes: int | None = Field(None, gt=0, description="nodes to use; all nodes of the cluster when not given")
    n_gpus_per_node: int | None = Field(None, ge=0, description="GPUs per node; what Ray reports when not given")
    mode: Literal["synchronous", "one_step_off", "asynchronous"] = Field(
        "synchronous",
        description="one_step_off: engines sample for the next step while this one is learned from; asynchronous: "
        "they sample all the time, and responses go on growing under new weights",
    )
    max_staleness: int = Field(
        1, ge=0, description="asynchronous: updates by which the weights behind a token may be older than the learner"
    )
    project_name: str = Field("slipway", description="where loggers file the run")
    loggers: list[LoggerName] = Field(
        [], description="where metrics go besides console, metrics.jsonl and TensorBoard: trainer/records/loggers/"
    )
    total_steps: int | None = Field(None, gt=0, description="steps to train; outranks total_epochs")
    total_epochs: int = Field(1, gt=0, description="passes over the training prompts")
    save_freq: int = Field(-1, description="steps between checkpoints; -1: at the end only; 0: never")
    keep_checkpoints: int | None = Field(None, gt=0, description="last checkpoints to keep; all when not given")
    test_before_training: bool = Field(True, description="measure the model as it starts")
    critic_warmup: int = Field(0, ge=0, description="first steps, in which the critic learns and the actor does not")
    test_freq: int = Field(
        5, description="steps between validations; -1: before the first and after the last step only"
    )
    stop_at: float | None = Field(None, description="end early once validation/exact_match reaches this")
    resume: Path | None = Field(
        None,
        description="checkpoint directory to continue from; auto: the last one of output_dir/run_id, or a new run",
    )
    seed: int = Field(0, description="decides the order of prompts and every sampled response")
    profiler: ProfilerConfig = ProfilerConfig()
    bind_cores: bool = Field(
        True, description="the processes of a GPU keep to the node's cores next to it, or to an equal part of all"
    )
    worker_timeout: float = Field(300.0, gt=0, description="seconds any single call to a worker may take")

    @property
    def resumes_itself(self) -> bool:
        """Whether the run looks for its own last checkpoint, as one that a scheduler starts again does."""
        return self.resume == Path("auto")

    @model_validator(mode="after")
    def _a_run_that_resumes_itself_has_a_name(self) -> Self:
        if self.resumes_itself and self.run_id is None:
            raise ValueError("trainer.resume=auto needs trainer.run_id, whose checkpoints it continues")
        return self


class RunConfig(Section):
    """What every kind of run is told."""

    model: ModelConfig = ModelConfig()
    trainer: TrainerConfig = TrainerConfig()


class Config(RunConfig):
    data: DataConfig = DataConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    watchdogs: WatchdogsConfig = WatchdogsConfig()
    device_mapping: DeviceMappingConfig = DeviceMappingConfig()

    @property
    def responses(self) -> int:
        """How many a step learns from."""
        return self.data.train_batch_size * self.rollout.samples_per_prompt

    @property
    def needs_critic(self) -> bool:
        """Whether the advantages are made from values."""
        return self.algorithm.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether the policy is held to the one it started from."""
        return self.algorithm.kl_coefficient > 0 or self.actor.kl_loss_coefficient > 0

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the policy that sampled is asked for its log-probs before the actor learns.

        A single optimizer step makes them on its way; who else wants them: the KL, and the comparison with the engines.
        """
        single_step = self.actor.ppo_epochs == 1 and self.actor.mini_batch_size == self.responses
        return not single_step or self.needs_reference or self.rollout.log_probs

    @property
    def actor_is_reference(self) -> bool:
        """Whether the actor without its adapters is the reference, so that no other network has to be."""
        return self.actor.lora.rank > 0

    @property
    def trained(self) -> dict[str, ActorConfig | CriticConfig]:
        """The settings of each role that takes optimizer steps."""
        return {"actor": self.actor, "critic": self.critic} if self.needs_critic else {"actor": self.actor}

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        algorithm, samples = self.algorithm, self.rollout.samples_per_prompt
        wants = f"algorithm.advantage={algorithm.advantage}" if algorithm.advantage in ("grpo", "rloo") else ""
        wants = "algorithm.dynamic_sampling=true" if algorithm.dynamic_sampling else wants
        if wants and samples == 1:
            raise ValueError(
                f"{wants} compares responses to the same prompt: set rollout.samples_per_prompt to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        """Every optimizer step uses equally many responses, and none is left over."""
        for role, section in self.trained.items():
            if self.responses % section.mini_batch_size:
                raise ValueError(
                    f"{role}.mini_batch_size={section.mini_batch_size} does not divide the {self.responses} responses "
                    "of a step (data.train_batch_size x rollout.samples_per_prompt)"
                )
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        algorithm, buffer, longest = self.algorithm, self.reward.overlong_buffer, self.data.max_response_length
        if algorithm.correction_low >= algorithm.correction_high:
            raise ValueError("algorithm.correction_low is not below algorithm.correction_high")
        if algorithm.correction != "none" and not self.rollout.log_probs:
            raise ValueError(f"algorithm.correction={algorithm.correction} needs rollout.log_probs=true")
        if self.trainer.mode != "synchronous" and algorithm.correction == "none":
            raise ValueError(f"trainer.mode={self.trainer.mode} learns from an older policy: set algorithm.correction")
        if self.trainer.mode == "asynchronous" and (algorithm.dynamic_sampling or algorithm.advantage == "remax"):
            name = "dynamic_sampling" if algorithm.dynamic_sampling else "advantage=remax"
            raise ValueError(
                f"trainer.mode=asynchronous samples one response after the other: not with algorithm.{name}"
            )
        if buffer > longest:
            raise ValueError(f"reward.overlong_buffer={buffer} exceeds data.max_response_length={longest}")
        if self.trainer.critic_warmup and not self.needs_critic:
            raise ValueError(f"trainer.critic_warmup: algorithm.advantage={algorithm.advantage} has no critic")
        if algorithm.kl_control == "adaptive" and algorithm.kl_coefficient == 0:
            raise ValueError("algorithm.kl_control=adaptive needs an algorithm.kl_coefficient above 0 to start from")
        return self

    @model_validator(mode="after")
    def _roll_backs_have_somewhere_to_go(self) -> Self:
        dogs = self.watchdogs
        named = (dogs.reward_deviation, dogs.kl, dogs.entropy, dogs.ratio_drift, dogs.memory_growth)
        if any(dog.action == "roll_back" for dog in named) and self.trainer.save_freq < 1:
            raise ValueError("a watchdog with action=roll_back needs checkpoints: set trainer.save_freq to 1 or more")
        return self

    def with_absolute_paths(self) -> Self:
        """The same settings with paths that hold in workers, whose working directory is another one."""

        def absolute(path: Path | None) -> Path | None:
            return path and path.expanduser().absolute()

        def located(custom: CustomCode) -> CustomCode:
            return custom.model_copy(update={"path": absolute(custom.path)})

        environment = located(self.rollout.environment)
        reward = {
            "custom_function": located(self.reward.custom_function),
            "model": self.reward.model.model_copy(update={"path": absolute(self.reward.model.path)}),
        }
        model = self.model.model_copy(update={"path": absolute(self.model.path)})
        critic = self.critic.model_copy(update={"path": absolute(self.critic.path)})
        files = {
            "train_files": [file.expanduser().absolute() for file in self.data.train_files],
            "validation_files": [file.expanduser().absolute() for file in self.data.validation_files],
            "cache_dir": absolute(self.data.cache_dir),
        }
        profiler = self.trainer.profiler.model_copy(update={"dir": absolute(self.trainer.profiler.dir)})
        paths = {
            "output_dir": absolute(self.trainer.output_dir),
            "resume": absolute(self.trainer.resume),
            "profiler": profiler,
        }
        return self.model_copy(
            update={
                "data": self.data.model_copy(update=files),
                "model": model,
                "critic": critic,
                "rollout": self.rollout.model_copy(update={"environment": environment}),
                "reward": self.reward.model_copy(update=reward),
                "trainer": self.trainer.model_copy(update=paths),
            }
        )

    def check_ranks(self, ranks: Mapping[str, int]) -> None:
        """Raises ConfigError if the batches of a role cannot be split evenly over its ranks."""
        for role, section in self.trained.items():
            if section.mini_batch_size % ranks[role]:
                raise ConfigError(
                    f"{role}.mini_batch_size={section.mini_batch_size} cannot be split evenly over {ranks[role]} ranks",
                    hint=f"make it a multiple of {ranks[role]} that divides the responses of a step",
                )
            section.sharding.check_ranks(role, role, ranks[role])
        if self.needs_reference and "reference" in ranks:
            self.actor.sharding.check_ranks("actor", "reference", ranks["reference"])
        if self.needs_reference and self.responses % ranks.get("reference", 1):
            raise ConfigError(
                f"the {self.responses} responses of a step cannot be split evenly over {ranks['reference']} ranks of "
                "the reference",
                hint="change data.train_batch_size, or device_mapping.reference",
            )
