"""How the ranks of a trained role share its weights, and where these lie while nobody computes with them."""

from typing import Self

from pydantic import Field, model_validator

from trainer.config.section import Section
from trainer.errors import ConfigError


class ShardingConfig(Section):
    shard_size: int | None = Field(
        None,
        gt=0,
        description="ranks that share one copy of the weights, neighbours such as the GPUs of a node; the copies' "
        "gradients are averaged (HSDP). null: all ranks share one copy (FSDP)",
    )
    tensor_parallel: int = Field(
        1,
        gt=0,
        description="neighbouring ranks that split each layer's matrix products, and the activations in them; for "
        "models or rows too large for one GPU",
    )
    reshard_after_forward: bool | int = Field(
        True,
        description="true: a layer's gathered weights are dropped until its backward pass; false: they are kept, for "
        "more memory and less traffic; a number: they are kept spread over as many neighbouring ranks",
    )
    resharding_interval: int = Field(
        1,
        gt=0,
        description="micro-batches for which weights stay gathered; more than 1 sets reshard_after_forward aside",
    )
    gradient_sync_interval: int = Field(
        1,
        gt=0,
        description="micro-batches whose gradients add up on each rank before the ranks average them; more than 1 "
        "takes 4 bytes per weight of the whole network on each",
    )
    param_offload: bool = Field(
        False, description="weights lie in the node's memory while the role waits for its turn; on GPUs only"
    )
    optimizer_offload: bool = Field(
        False, description="so do the optimizer's states, unless the role takes optimizer steps; on GPUs only"
    )

    @model_validator(mode="after")
    def _one_way_to_keep_weights(self) -> Self:
        kept = self.reshard_after_forward
        if not isinstance(kept, bool) and (kept < 2 or self.resharding_interval > 1):
            raise ValueError(
                f"reshard_after_forward={kept}: a number of ranks is at least 2, and needs resharding_interval=1"
            )
        return self

    def without_offload(self) -> Self:
        """The same for a device whose memory is the node's."""
        return self.model_copy(update={"param_offload": False, "optimizer_offload": False})

    def check_ranks(self, section: str, role: str, ranks: int) -> None:
        """Raises ConfigError if the ranks of a role cannot be divided as these settings, those of a section, say."""
        size = self.shard_size or ranks
        if ranks % size:
            raise ConfigError(
                f"{section}.sharding.shard_size={size} does not divide the {ranks} ranks of the {role}",
                hint="set it to the GPUs of a node, or leave it out",
            )
        if size % self.tensor_parallel:
            raise ConfigError(
                f"{section}.sharding.tensor_parallel={self.tensor_parallel} does not divide the {size} ranks that "
                f"share the weights of the {role}",
                hint="set it to a divisor of the GPUs of a node",
            )
        kept, size = self.reshard_after_forward, size // self.tensor_parallel
        if not isinstance(kept, bool) and (size % kept or kept == size):
            raise ConfigError(
                f"{section}.sharding.reshard_after_forward={kept} is no smaller divisor of the {size} ranks that share "
                f"the weights of the {role}",
                hint="set it to true, false, or the GPUs of a node",
            )
