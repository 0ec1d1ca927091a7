"""Sharding and offload of a trained role's weights."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trainer.config.section import Section
from trainer.errors import ConfigError


class ShardingConfig(Section):
    shard_size: int | None = Field(
        None,
        gt=0,
        description="neighbouring ranks that share one copy of the weights, like the GPUs of a node; gradients are "
        "averaged over the copies (HSDP). null: one copy over all ranks (FSDP)",
    )
    tensor_parallel: int = Field(
        1,
        gt=0,
        description="neighbouring ranks that split each layer's matrix products and activations",
    )
    context_parallel: int = Field(
        1,
        gt=0,
        description="neighbouring ranks that compute the same rows together, each a part of every row's tokens "
        "(Ulysses), for rows that are too long for the memory of one",
    )
    expert_parallel: int = Field(
        1,
        gt=0,
        description="neighbouring ranks that divide the experts of each layer among them; tokens travel to the ranks "
        "of their experts. 1: experts are sharded and gathered like all other weights",
    )
    reshard_after_forward: bool | int = Field(
        True,
        description="true: free a layer's gathered weights until its backward pass; false: keep them, for more memory "
        "and less traffic; a number: shard them over that many neighbouring ranks",
    )
    resharding_interval: int = Field(
        1,
        gt=0,
        description="micro-batches for which weights stay gathered; more than 1 overrides reshard_after_forward. "
        "Chosen on GPUs if neither is given (`trainer plan`)",
    )
    gradient_sync_interval: int = Field(
        1,
        gt=0,
        description="micro-batches whose gradients a rank accumulates before the ranks average them; more than 1 costs"
        " 4 bytes per weight of the whole network. Chosen on GPUs if not given (`trainer plan`)",
    )
    gradient_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type in which the ranks average gradients; bfloat16 halves the traffic and rounds"
    )
    param_offload: bool = Field(False, description="keep weights in CPU memory while the role is idle; GPUs only")
    optimizer_offload: bool = Field(
        False, description="keep optimizer state in CPU memory outside of optimizer steps; GPUs only"
    )

    @model_validator(mode="after")
    def _one_way_to_keep_weights(self) -> Self:
        kept = self.reshard_after_forward
        if not isinstance(kept, bool) and (kept < 2 or self.resharding_interval > 1):
            raise ValueError(
                f"reshard_after_forward={kept}: a number of ranks is at least 2, and needs resharding_interval=1"
            )
        return self

    @model_validator(mode="after")
    def _experts_are_divided_in_one_way(self) -> Self:
        if self.expert_parallel == 1:
            return self
        if self.tensor_parallel > 1:
            raise ValueError(
                f"expert_parallel={self.expert_parallel} does not support tensor_parallel={self.tensor_parallel}: set "
                "tensor_parallel=1; context_parallel also splits activations"
            )
        if not isinstance(self.reshard_after_forward, bool):
            raise ValueError(
                f"expert_parallel={self.expert_parallel} does not support reshard_after_forward="
                f"{self.reshard_after_forward}: set that to true or false"
            )
        return self

    @property
    def ranks_per_data_group(self) -> int:
        """Neighbouring ranks that compute the same rows."""
        return self.context_parallel * self.tensor_parallel

    def without_offload(self) -> Self:
        """These settings without offloading, for a device that uses the node's memory anyway."""
        return self.model_copy(update={"param_offload": False, "optimizer_offload": False})

    def check_ranks(self, section: str, role: str, ranks: int) -> None:
        """Raises ConfigError, which names the section, if these settings cannot divide the ranks of a role."""
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
        if size % self.expert_parallel:
            sizes = [str(number) for number in range(1, size + 1) if size % number == 0]
            raise ConfigError(
                f"{section}.sharding.expert_parallel={self.expert_parallel} does not divide the {size} ranks that "
                f"share the weights of the {role}",
                hint=f"set it to {' or '.join(sizes)}",
            )
        if ranks % self.ranks_per_data_group:
            groups = ranks // self.tensor_parallel
            sizes = [str(size) for size in range(1, groups + 1) if groups % size == 0]
            left = f" / tensor_parallel={self.tensor_parallel}" if groups < ranks else ""
            raise ConfigError(
                f"{section}.sharding.context_parallel={self.context_parallel} does not divide the {ranks} ranks of the "
                f"{role}{left}",
                hint=f"set it to {' or '.join(sizes)}",
            )
        kept, size = self.reshard_after_forward, size // self.tensor_parallel
        if not isinstance(kept, bool) and (size % kept or kept == size):
            raise ConfigError(
                f"{section}.sharding.reshard_after_forward={kept} is not a smaller divisor of the {size} ranks that "
                f"share the weights of the {role}",
                hint="set it to true, false, or the GPUs of a node",
            )
