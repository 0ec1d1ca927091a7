"""Ranks that divide experts, for test_experts.py: `expert_program.py DIRECTORY`.

Writes what each case found to DIRECTORY/world_WORLD_SIZE.pt. All ranks are forks of this process: importing takes
longest.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.trainer.models.test_log_probs_by_family import TEMPERATURE, language_model
from tests.trainer.models.test_log_probs_by_family import rows as tokens
from tests.trainer.training.rank_program import loss
from tests.trainer.training.ranks import fork_ranks
from trainer.config.sections.roles import LoraConfig
from trainer.config.sections.sharding import ShardingConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.lora import adapted_layers, add_adapters
from trainer.models.networks import PolicyNetwork
from trainer.training.engine import OptimizerSettings, TrainingEngine, parameter_groups
from trainer.training.ranks.sharded_state import ShardedState
from trainer.training.ranks.sharding import Execution

# With its default epsilon, AdamW would amplify the rounding of gradients near 0.
RATE, DECAY, MOST_NORM, EPSILON, UPDATES = 1e-2, 0.1, 1.0, 1e-3, 3
SETTINGS = OptimizerSettings(RATE, DECAY, MOST_NORM, arguments={"eps": EPSILON})

ROUTED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
NARROW = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"block_size": 4, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, **NARROW},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 16, **NARROW},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {**ROUTED, **LATENT, **NARROW, "num_key_value_heads": 4, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**ROUTED, **LATENT, **NARROW, "num_key_value_heads": 4},
    "glm4_moe": {**ROUTED, **NARROW},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, **WINDOWS},
    "minimax": {"num_local_experts": 8, **LINEAR},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
DENSE = "qwen3"


@dataclass(frozen=True)
class Model:
    """A family. `favoured` experts are those that every token chooses."""

    family: str
    favoured: int = 0
    adapters: bool = False

    def make(self) -> nn.Module:
        choices = {"num_experts_per_tok": self.favoured} if self.favoured else {}
        made = language_model(self.family, FAMILIES.get(self.family, {}) | choices)
        for name, tensor in [*made.named_buffers(), *made.named_parameters()]:
            if name.endswith(("e_score_correction_bias", "router.bias")):
                tensor.data.normal_(std=0.3, generator=torch.Generator().manual_seed(6))
                tensor.data[: self.favoured] += 100
        if self.adapters:
            add_adapters(made, LoraConfig(rank=2, alpha=6, target_modules=["q_proj", "o_proj"]), seed=3)
            generator = torch.Generator().manual_seed(4)
            for _, layer in adapted_layers(made):
                layer.lora_B.data.normal_(std=0.1, generator=generator)
        return made


@dataclass(frozen=True)
class Case:
    """A model, and how ranks compute it."""

    model: Model
    sharding: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 3  # of a micro-batch
    checkpointing: bool = False
    fused: bool = False  # the optimizer's kernel, which GPUs always use; biases then do not decay
    first_reads: bool = False  # only the first rank has the weights, and broadcasts them

    @property
    def name(self) -> str:
        """What tests show."""
        flags = [name for name in ("checkpointing", "fused", "first_reads") if getattr(self, name)]
        flags += ["adapters"] * self.model.adapters + [f"favoured={self.model.favoured}"] * bool(self.model.favoured)
        return " ".join([self.model.family, *(f"{name}={value}" for name, value in self.sharding.items()), *flags])


QWEN, DEEPSEEK, GPT = Model("qwen3_moe"), Model("deepseek_v3"), Model("gpt_oss")
TWO, FOUR = {"expert_parallel": 2}, {"expert_parallel": 4}
# By number of ranks.
CASES: dict[int, list[Case]] = {
    1: [Case(Model(family)) for family in FAMILIES],
    2: [
        *(Case(Model(family), TWO) for family in FAMILIES),
        Case(Model("qwen3_moe", adapters=True), TWO),
        Case(QWEN, TWO, checkpointing=True),
        Case(QWEN, {**TWO, "param_offload": True, "optimizer_offload": True}),
        Case(DEEPSEEK, {**TWO, "context_parallel": 2}),
        Case(Model("deepseek_v3", favoured=2), TWO),
        Case(DEEPSEEK, TWO, first_reads=True),
        Case(GPT, TWO, fused=True),
        Case(Model(DENSE), {"tensor_parallel": 2}, fused=True),
    ],
    4: [
        Case(QWEN, FOUR, rows=1),
        Case(GPT, FOUR),
        Case(QWEN, TWO),
        Case(GPT, {**TWO, "resharding_interval": 2}, rows=1),
        Case(DEEPSEEK, {**TWO, "context_parallel": 2}),
        Case(QWEN, {**FOUR, "context_parallel": 2}),
        Case(GPT, {**TWO, "context_parallel": 4}),
        Case(QWEN, {**TWO, "shard_size": 2}),
        Case(DEEPSEEK, {**TWO, "shard_size": 2, "gradient_sync_interval": 2}, rows=1),
        Case(Model("gpt_oss", favoured=1), FOUR),
        Case(Model("deepseek_v3", favoured=2), FOUR, checkpointing=True),
    ],
}
Found = dict[str, Any]


def rows() -> Batch:
    batch = tokens()
    advantages = torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(2))
    return batch.with_(advantages=advantages * batch.response_mask)


def whole_gradients(network: nn.Module) -> dict[str, Tensor]:
    """By Transformers' names."""
    return {
        name.removeprefix("language_model."): weight.grad.full_tensor()
        for name, weight in network.named_parameters()
        if weight.grad is not None
    }


def engine_of(case: Case) -> TrainingEngine:
    execution = Execution(
        torch.device("cpu"),
        torch.float32,
        checkpoint_activations=case.checkpointing,
        sharding=ShardingConfig(**case.sharding),
    )
    with torch.device("meta" if case.first_reads and dist.get_rank() else "cpu"):
        model = case.model.make()
    engine = TrainingEngine(PolicyNetwork(model, TEMPERATURE), execution, SETTINGS)
    if case.fused:
        groups = parameter_groups(engine.network, decay_vectors=False)
        engine.optimizer = torch.optim.AdamW(groups, RATE, weight_decay=DECAY, eps=EPSILON, fused=True)
    return engine


def trained(case: Case) -> Found:
    """Log-probs of all rows, gradients and metrics, then the metrics and weights of some updates."""
    engine, limit = engine_of(case), MicroBatchLimit(case.rows)
    members = engine.ranks_per_data_group
    batch = rows()
    shards = batch.shards(dist.get_world_size() // members)
    share = batch.rows(shards[dist.get_rank() // members].rows)
    log_probs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(log_probs, engine.forward(share, limit))
    metrics = engine.accumulate_gradients(share, loss, limit)
    gradients = whole_gradients(engine.network)
    engine.optimizer.zero_grad()
    updates = [engine.update(share, loss, limit) for _ in range(UPDATES)]
    weights, gathered = whole_weights(engine), whole_weights(engine, torch.float32)
    return {
        "log_probs": torch.cat(log_probs[::members])[torch.cat([shard.rows for shard in shards]).argsort()],
        "gradients": gradients,
        "metrics": metrics,
        "updates": updates,
        "weights": weights,
        "gathered alike": all(torch.equal(weight, gathered[name]) for name, weight in weights.items()),
    }


def whole_weights(engine: TrainingEngine, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    model = engine.network.language_model
    return {name: weight.clone() for name, weight in engine.full_weights(model, shared_once=True, dtype=dtype)}


# By number of ranks: the layouts of a run that is resumed, each from the checkpoint of the one before.
RESUMED: dict[int, Case] = {1: Case(DEEPSEEK), 2: Case(DEEPSEEK, TWO), 4: Case(DEEPSEEK, TWO)}


def resumed(case: Case, directory: Path) -> dict[str, Tensor]:
    """Saves the state that the smaller group has saved, or that after an update; the weights after another one."""
    ranks, engine = dist.get_world_size(), engine_of(case)
    batch, state, limit = rows(), ShardedState(engine), MicroBatchLimit(case.rows)
    share = batch.rows(batch.shards(ranks)[dist.get_rank()].rows)
    if ranks == 1:
        engine.update(share, loss, limit)
    else:
        state.load(directory / f"of_{ranks // 2}")
    state.start_save(directory / f"of_{ranks}")
    state.finish_save(60)
    engine.update(share, loss, limit)
    return whole_weights(engine)


def run(rank: int, world_size: int, directory: Path) -> None:
    results: dict[str, Any] = {case.name: trained(case) for case in CASES[world_size]}
    results["resumed"] = resumed(RESUMED[world_size], directory)
    if rank == 0:
        torch.save(results, directory / f"world_{world_size}.pt")


def main(directory: Path) -> None:
    for world_size in CASES:
        fork_ranks(run, world_size, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
