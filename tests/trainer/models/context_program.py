"""One rank of a context group, for test_context_parallel.py: `context_program.py RANK WORLD_SIZE PORT DIRECTORY`.

Each case computes the same rows without a group and sharded by FSDP2 with one. Rank 0 writes both results of each case
to DIRECTORY/found_WORLD_SIZE.pt.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.trainer.models.test_log_probs_by_family import language_model, rows
from trainer.config.sections.roles import LoraConfig
from trainer.config.sections.sharding import ShardingConfig
from trainer.data.batches.batch import Batch
from trainer.models.backend import training_backend
from trainer.models.context_parallel import ContextGroup
from trainer.models.lora import adapted_layers, add_adapters
from trainer.models.networks import PolicyNetwork, ValueNetwork
from trainer.models.packing import PackedRows
from trainer.models.tensor_parallel import add_gradients_of_heads
from trainer.training.ranks.process_group import connect_store, join
from trainer.training.ranks.sharding import SHARD, TENSOR, Execution, device_mesh, shard

EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16},
    **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4},
    **EXPERTS,
    **LATENT,
}


@dataclass(frozen=True)
class Case:
    """A model, which rows are in each micro-batch, and how the network computes."""

    family: str
    parts: Sequence[Sequence[int]] = (range(7),)
    special: dict[str, Any] | None = None
    share_prompts: bool = True
    adapters: bool = False
    execution: dict[str, Any] = field(default_factory=dict)


ALONE = [[row] for row in range(7)]
SPLIT = {"sharding": ShardingConfig(tensor_parallel=2)}
MEGATRON = {"backend": training_backend("megatron")}
CASES = {
    2: {
        "qwen3": Case("qwen3"),
        "prompts not shared": Case("qwen3", share_prompts=False),
        "a row alone, of unequal length": Case("qwen3", ALONE),
        "members without a response token": Case("qwen3", [[2]]),
        "layers computed again": Case("qwen3", ALONE, execution={"checkpoint_activations": True}),
        "adapters": Case("qwen3", adapters=True),
        "sinks, windows, experts": Case("gpt_oss"),
        "caps, windows": Case("gemma2"),
        "latent attention": Case("deepseek_v3", special=DEEPSEEK),
        "Megatron": Case("qwen3", execution=MEGATRON),
    },
    4: {
        "fewer key-value heads than members": Case("qwen3", ALONE),
        "sinks, windows, experts": Case("gpt_oss"),
        "matrices split": Case("qwen3", execution=SPLIT),
    },
}
Found = dict[str, Tensor]


def model(case: Case) -> nn.Module:
    made = language_model(case.family, case.special)
    if case.adapters:
        add_adapters(made, LoraConfig(rank=2, alpha=6, target_modules=["q_proj", "down_proj"]), seed=3)
        generator = torch.Generator().manual_seed(4)
        for _, layer in adapted_layers(made):
            layer.lora_B.data.normal_(std=0.1, generator=generator)
    return made


def networks(case: Case) -> list[nn.Module]:
    """A policy and, unless the case is about the policy's layers, a critic."""
    critic = ValueNetwork(model(case))
    nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(5))
    return [PolicyNetwork(model(case), 0.7)] if case.execution else [PolicyNetwork(model(case), 0.7), critic]


def compute(
    network: nn.Module, batch: Batch, case: Case, multiple: int = 1, split: dist.ProcessGroup | None = None
) -> Found:
    """Outputs of the network, and the gradients of a loss that is not linear in them.

    FSDP averages gradients over `multiple` ranks. The ranks of `split` split matrix products.
    """
    computed: Found = {}
    kind = "policy" if isinstance(network, PolicyNetwork) else "critic"
    for number, part in enumerate(case.parts):
        packed = PackedRows.of(batch.rows(torch.tensor(list(part))), multiple, case.share_prompts)
        if isinstance(network, PolicyNetwork):
            with torch.no_grad(), network.returning_squares():
                computed[f"squares of part {number}"] = network(packed)[0]
            log_probs, entropy = network(packed)
            computed |= {f"log-probs of part {number}": log_probs, f"entropy of part {number}": entropy}
            loss = (log_probs + log_probs.square() / 20 - entropy).sum()
        else:
            values = network(packed)
            computed[f"values of part {number}"] = values
            loss = (values - 1).square().sum()
        (loss * multiple).backward()
    if split is not None:
        add_gradients_of_heads(network.decoder.layers, split)
    for name, weight in network.named_parameters():
        if weight.grad is not None:
            whole = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
            computed[f"{kind}: gradient of {name}"] = whole
    return {name: tensor.detach().clone() for name, tensor in computed.items()}


def results(case: Case, batch: Batch) -> tuple[Found, Found]:
    """What one process computes, and what all ranks compute together."""
    execution = Execution(torch.device("cpu"), torch.float32, **case.execution)
    mesh = device_mesh(execution)
    context = ContextGroup(mesh[SHARD].get_group())
    alone: Found = {}
    together: Found = {}
    for network in networks(case):
        alone |= compute(network, batch, case)
    for network in networks(case):
        network.context = context
        split = mesh[TENSOR].get_group() if TENSOR in mesh.mesh_dim_names else None
        together |= compute(shard(network, execution, mesh), batch, case, context.size, split)
    for tensor in together.values():  # the members go on with the same numbers
        of_first = tensor.clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(of_first, tensor)
    return alone, together


def main(rank: int, world_size: int, port: int, directory: Path) -> None:
    join(connect_store("127.0.0.1", port, world_size, 60), rank, world_size, torch.device("cpu"), "127.0.0.1", 60)
    pairs = {name: results(case, rows()) for name, case in CASES[world_size].items()}
    if rank == 0:
        torch.save(pairs, directory / f"found_{world_size}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
