"""Ranks that load tiny models, for test_loading.py: `loading_program.py DIRECTORY`.

Writes to DIRECTORY/loaded.pt which weights and buffers of each engine differ from those that Transformers loads.
"""

import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.trainer.models.tiny_families import FAMILIES, write_tiny_model
from tests.trainer.training.ranks import fork_ranks
from trainer.config.sections.roles import LoraConfig
from trainer.config.sections.sharding import ShardingConfig
from trainer.errors import DataError
from trainer.models.lora import adapter_parameters, add_adapters
from trainer.models.networks import PolicyNetwork, ValueNetwork
from trainer.models.pretrained import empty_language_model, load_language_model
from trainer.training.engine import TrainingEngine
from trainer.training.ranks.loading import take_weights
from trainer.training.ranks.sharding import Execution

LAYOUTS = {
    2: {"sharded": ShardingConfig(), "a copy on each rank": ShardingConfig(shard_size=1)},
    4: {"two copies": ShardingConfig(shard_size=2), "uneven": ShardingConfig()},
}
LORA = LoraConfig(rank=2, target_modules=["q_proj"])


def engine(network: nn.Module, sharding: ShardingConfig | None = None) -> TrainingEngine:
    execution = Execution(torch.device("cpu"), torch.float32, sharding=sharding or ShardingConfig())
    return TrainingEngine(network, execution)


def different(network: nn.Module, expected: nn.Module) -> list[str]:
    """The names of what differs from an unsharded network, parameters under all of their names."""
    wanted = {**dict(expected.named_parameters(remove_duplicate=False)), **dict(expected.named_buffers())}
    tensors = {**dict(network.named_parameters(remove_duplicate=False)), **dict(network.named_buffers())}
    whole = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    missing = sorted(wanted.keys() ^ tensors.keys())
    return missing + [name for name in whole if name in wanted and not torch.equal(whole[name], wanted[name])]


def experts_and_shards(directory: Path) -> list[str]:
    """What differs if two ranks hold other experts, and two the other half of each matrix."""
    network, expected = (load_language_model(directory, in_files=where) for where in (True, False))
    fill = take_weights(network, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_shard", "expert"))
    for module in network.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            places = (Shard(1), Shard(0)) if weight.dim() == 3 else (Shard(0), Shard(0))
            sharded = distribute_tensor(weight.detach(), mesh, places, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded))
    fill(network)
    return different(network, expected)


def run(rank: int, world_size: int, directory: Path) -> None:
    results: dict[Any, Any] = {}
    for name, sharding in LAYOUTS[world_size].items():
        for family in FAMILIES:
            model, expected = (load_language_model(directory / family, in_files=where) for where in (True, False))
            results[name, family] = different(
                engine(PolicyNetwork(model, 1.0), sharding).network.language_model, expected
            )
    if world_size == 4:
        results["experts and shards"] = experts_and_shards(directory / "qwen3_moe")
    else:
        qwen2 = directory / "qwen2"
        body, expected = (load_language_model(qwen2, in_files=where) for where in (True, False))
        critic = ValueNetwork(body)
        critic.head.weight.data.fill_(0.5)
        network = engine(critic).network
        results["critic"] = different(network.body, expected.get_decoder())
        results["head"] = network.head.weight.full_tensor()
        adapted, expected = (load_language_model(qwen2, in_files=where) for where in (True, False))
        for model in (adapted, expected):
            add_adapters(model, LORA, seed=1)
        results["adapters"] = different(engine(PolicyNetwork(adapted, 1.0)).network.language_model, expected)
        assert list(adapter_parameters(expected))
        first = load_language_model(qwen2) if rank == 0 else empty_language_model(qwen2)
        expected = load_language_model(qwen2)
        results["broadcast"] = different(engine(PolicyNetwork(first, 1.0)).network.language_model, expected)
        other = load_language_model(directory / ("qwen2" if rank == 0 else "other"), in_files=True)
        try:
            engine(PolicyNetwork(other, 1.0))
        except DataError as error:
            results["other files"] = str(error)
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, results)
        results["other files"] = [results_of_rank.get("other files") for results_of_rank in gathered]
    if rank == 0:
        torch.save(results, directory / f"loaded_{world_size}.pt")


def main(directory: Path) -> None:
    logging.disable(logging.WARNING)
    for family in FAMILIES:
        write_tiny_model(family, directory / family)
    changed = load_language_model(write_tiny_model("qwen2", directory / "other"), torch.bfloat16)
    changed.get_decoder().norm.weight.data.fill_(2.0)
    changed.save_pretrained(directory / "other")
    for file in (directory / "other").glob("model-*"):
        file.unlink()
    (directory / "other" / "model.safetensors.index.json").unlink(missing_ok=True)
    for world_size in LAYOUTS:
        fork_ranks(run, world_size, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
