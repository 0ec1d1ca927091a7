"""Actor, critic and reference."""

from functools import partial
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from trainer.algorithms.aggregation import Aggregation
from trainer.algorithms.kl import KlEstimator
from trainer.algorithms.registry import POLICY_LOSSES
from trainer.config.section import ModelPath, Section, with_parameters
from trainer.config.sharding import ShardingConfig
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
        description="rank of the adapters, as far as vLLM goes; 0: no adapters, all weights are trained",
    )
    alpha: float = Field(16.0, gt=0, description="what adapters add is multiplied by alpha / rank")
    target_modules: list[str] = Field(
        [ALL_LINEAR], min_length=1, description="names of the layers with an adapter, as q_proj; all-linear: every one"
    )


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


@partial(with_parameters, tables=(POLICY_LOSSES,))
class ActorConfig(TrainedModelConfig):
    learning_rate: float = Field(1e-6, gt=0, description="of AdamW; 1e-6 suits models of some billion parameters")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW, per step and unit of learning rate")
    max_gradient_norm: float = Field(1.0, gt=0, description="L2 norm to which gradients are clipped")
    ppo_epochs: int = Field(1, gt=0, description="passes over each batch")
    mini_batch_size: int = Field(128, gt=0, description="responses per optimizer step, over all ranks")
    policy_loss: PolicyLossName = Field("ppo", description="loss of the policy: trainer/algorithms/policy_losses/")
    loss_aggregation: Aggregation = Field("token-mean", description="how losses of tokens become one loss")
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of the entropy bonus in the loss")
    kl_loss_coefficient: float = Field(0.0, ge=0, description="weight of the KL to the reference in the loss; 0: none")
    kl_loss_estimator: KlEstimator = Field("k3", description="value of that KL")
    kl_loss_unbiased: bool = Field(True, description="take the gradient of k2, which is the KL's, for any estimator")


class CriticConfig(TrainedModelConfig):
    path: ModelPath | None = Field(None, description="model to start from; the actor's when not given")
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
