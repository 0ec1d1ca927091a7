"""Settings of actor, critic and reference."""

from functools import partial
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trainer.algorithms.losses.aggregation import Aggregation
from trainer.algorithms.losses.kl import KlEstimator
from trainer.algorithms.registry import POLICY_LOSSES
from trainer.config.section import AbsolutePath, ModelPath, Section, with_parameters
from trainer.config.sections.optimization import OptimizerConfig, ScheduleConfig
from trainer.config.sections.sharding import ShardingConfig
from trainer.rows import module_names

if TYPE_CHECKING:
    BackendName = str
    PolicyLossName = str
else:
    BackendName = Literal[module_names("models/backends")]
    PolicyLossName = Literal[tuple(POLICY_LOSSES)]

ALL_LINEAR = "all-linear"


class LoraConfig(Section):
    rank: int = Field(
        0,
        ge=0,
        le=512,
        description="rank of the LoRA adapters; 0: none, or with `path` the rank, alpha and layers of that adapter",
    )
    alpha: float = Field(16.0, gt=0, description="the output of adapters is scaled by alpha / rank")
    target_modules: list[str] = Field(
        [ALL_LINEAR],
        min_length=1,
        description="names of the layers that get an adapter, like q_proj; all-linear: every linear layer",
    )
    exclude_modules: list[str] = Field(
        [],
        description="layers without an adapter: names, or regular expressions for whole paths, like .*layers\\.0\\..*",
    )
    path: AbsolutePath | None = Field(
        None, description="directory of an adapter in peft's format to start from; null: the adapters start at zero"
    )


class TrainedModelConfig(Section):
    """The settings that actor and critic share."""

    micro_batch_size: int = Field(64, gt=0, description="responses per forward pass and rank")
    micro_batch_tokens: int | None = Field(
        None,
        gt=0,
        description="tokens per forward pass and rank; overrides micro_batch_size. Ranks that compute rows together "
        "(sharding.context_parallel) add up their limits. Chosen on GPUs if neither is given "
        "(`trainer plan`)",
    )
    activation_checkpointing: bool = Field(
        False,
        description="recompute layers in the backward pass from their inputs: less memory, about a third more compute."
        " Chosen on GPUs if neither this nor micro_batch_size or micro_batch_tokens is given",
    )
    compile: bool = Field(True, description="compile the layers, on GPUs only")
    activation_memory_budget: float = Field(
        0.9,
        gt=0,
        le=1,
        description="share of the activations that compiled layers keep; the rest is recomputed, the cheapest first: "
        "at 0.9 everything between matrix products, lower also some matrix products",
    )
    share_prompts: bool = Field(
        True,
        description="compute a prompt once for all of its responses in a micro-batch; changes results by rounding "
        "only. Not for models whose rows cannot be packed",
    )
    backend: BackendName = Field(
        "fsdp",
        description="implementation of the layers. fsdp: Transformers; megatron: Megatron-Core, if installed; exact, "
        "for the actor only: the operators of vLLM's engines, so log-probs equal theirs to the bit (Qwen2 "
        "with heads of 128, H100 or H200)",
    )
    weights_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type of trained weights, gradients and optimizer state; bfloat16 halves their memory and loses "
        "changes below 1/256 of a weight",
    )
    router_dtype: Literal["model", "float32"] = Field(
        "model",
        description="type in which routers compute: the model's, or float32 with weights that are not rounded. Models "
        "with experts only",
    )
    shuffle: bool = Field(
        False,
        description="shuffle each data group's responses before they are divided into mini-batches, in each of "
        "ppo_epochs",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    sharding: ShardingConfig = ShardingConfig()
    lora: LoraConfig = LoraConfig()

    @property
    def needs_routers(self) -> list[str]:
        """The settings that need experts whose routers are known, as the user gives them."""
        return ["router_dtype=float32"] if self.router_dtype == "float32" else []

    @model_validator(mode="after")
    def _adapters_are_not_split(self) -> Self:
        if (self.lora.rank or self.lora.path) and self.sharding.tensor_parallel > 1:
            raise ValueError("adapters cannot be split: set lora.rank=0, or sharding.tensor_parallel=1")
        return self

    @model_validator(mode="after")
    def _experts_are_divided_in_layers_of_transformers(self) -> Self:
        if self.backend != "fsdp" and self.sharding.expert_parallel > 1:
            raise ValueError(
                f"backend={self.backend} does not support sharding.expert_parallel={self.sharding.expert_parallel}: "
                "leave it out, or set backend=fsdp"
            )
        return self


class AggregatedLossConfig(TrainedModelConfig):
    """The settings of a role whose token losses are aggregated as the user says."""

    loss_aggregation: Aggregation = Field("token-mean", description="how token losses are aggregated")
    loss_scale_length: int | None = Field(
        None,
        gt=0,
        description="seq-mean-token-sum-norm: tokens by which losses are divided; data.max_response_length when not "
        "given",
    )

    @model_validator(mode="after")
    def _losses_are_divided_by_the_length(self) -> Self:
        if self.loss_scale_length is not None and self.loss_aggregation != "seq-mean-token-sum-norm":
            raise ValueError(
                f"loss_scale_length={self.loss_scale_length} has no effect with loss_aggregation="
                f"{self.loss_aggregation}, only with seq-mean-token-sum-norm"
            )
        return self


@partial(with_parameters, tables=(POLICY_LOSSES,))
class ActorConfig(AggregatedLossConfig):
    learning_rate: float = Field(
        1e-6, gt=0, description="learning rate, before `schedule`; 1e-6 suits models of a few billion parameters"
    )
    weight_decay: float = Field(0.0, ge=0, description="weight decay of the optimizer")
    max_gradient_norm: float = Field(1.0, gt=0, description="gradients are clipped to this L2 norm")
    ppo_epochs: int = Field(1, gt=0, description="passes over each batch")
    mini_batch_size: int = Field(128, gt=0, description="responses per optimizer step, over all ranks")
    policy_loss: PolicyLossName = Field("ppo", description="loss of the policy: trainer/algorithms/policy_losses/")
    loss_aggregation: Aggregation = Field(
        "token-mean",
        description="how token losses are aggregated; sapo and gmpo are always seq-mean-token-mean, and their KL and "
        "entropy terms as set here",
    )
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of the entropy bonus in the loss")
    kl_loss_coefficient: float = Field(0.0, ge=0, description="weight of the KL to the reference in the loss; 0: none")
    kl_loss_estimator: KlEstimator = Field("k3", description="estimator of that KL")
    kl_loss_unbiased: bool = Field(True, description="use the gradient of k2, which is unbiased, with every estimator")
    router_replay: Literal["off", "recompute", "engine"] = Field(
        "off",
        description="experts that tokens choose in updates. off: by the weights of each pass; recompute: as in the "
        "pass for old log-probs; engine: as in the engine, in that pass too. Models with experts only",
    )
    router_aux_loss: float = Field(
        0.0,
        ge=0,
        description="weight in the loss of the experts' imbalance within a response, mean over responses, sum over "
        "layers; 0: none. Models with experts only, as router_z_loss",
    )
    router_z_loss: float = Field(
        0.0, ge=0, description="weight of the squared log-sum of exp(logits) of routers, averaged as router_aux_loss"
    )

    @property
    def needs_routers(self) -> list[str]:
        given = {
            f"router_replay={self.router_replay}": self.router_replay != "off",
            f"router_aux_loss={self.router_aux_loss:g}": self.router_aux_loss > 0,
            f"router_z_loss={self.router_z_loss:g}": self.router_z_loss > 0,
        }
        return [*super().needs_routers, *(setting for setting, needs in given.items() if needs)]

    @model_validator(mode="after")
    def _parameters_belong_to_the_loss(self) -> Self:
        accepted = POLICY_LOSSES[self.policy_loss].parameters
        for row in POLICY_LOSSES.values():
            for name in row.parameters.keys() - accepted.keys():
                if getattr(self, name) != row.parameters[name].default:
                    users = [other.name for other in POLICY_LOSSES.values() if name in other.parameters]
                    raise ValueError(
                        f"{name} has no effect with policy_loss={self.policy_loss}, only with {', '.join(users)}"
                    )
        return self


class CriticConfig(AggregatedLossConfig):
    path: ModelPath | None = Field(None, description="model to start from; the actor's when not given")
    learning_rate: float = Field(
        1e-5, gt=0, description="learning rate, before `schedule`; usually ten times the actor's"
    )
    weight_decay: float = Field(0.0, ge=0, description="weight decay of the optimizer")
    max_gradient_norm: float = Field(1.0, gt=0, description="gradients are clipped to this L2 norm")
    ppo_epochs: int = Field(1, gt=0, description="passes over each batch")
    mini_batch_size: int = Field(128, gt=0, description="responses per optimizer step, over all ranks")
    clip_range_value: float | None = Field(
        0.5, gt=0, description="clip range of a predicted value around its old one; null: no clipping"
    )


class ReferenceConfig(Section):
    """The reference policy. It takes all other settings from the actor."""

    param_offload: bool = Field(False, description="keep weights in CPU memory while the reference is idle; GPUs only")
