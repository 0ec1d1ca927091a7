"""One rank of a small FSDP run, for test_fsdp.py: `rank_program.py RANK WORLD_SIZE PORT DIRECTORY`.

Writes what it found to DIRECTORY/world_WORLD_SIZE.pt on rank 0. What two ranks save is loaded and saved again by
one, and that is loaded by four.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.config.sections.roles import LoraConfig
from trainer.config.sections.sharding import ShardingConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.errors import CheckpointError, WorkerError
from trainer.models.lora import adapted_layers, adapters_off, add_adapters, keep_start
from trainer.models.networks import PolicyNetwork
from trainer.training.compile_ahead import compile_ahead, typical_rows
from trainer.training.engine import OptimizerSettings, TrainingEngine, optimizer_states
from trainer.training.ranks.process_group import connect_store, join
from trainer.training.ranks.sharded_state import ShardedState
from trainer.training.ranks.sharding import Execution

ROWS = 8
CONTINUES = {1: 2, 4: 1}  # one rank continues from two ranks' checkpoint, four from that one's
LORA = LoraConfig(rank=2, alpha=6, target_modules=["q_proj", "down_proj"])
SETTINGS = OptimizerSettings(learning_rate=1e-2, weight_decay=0.01, max_gradient_norm=0.5)
# Shardings and offloads, none of which may change a gradient; some need four ranks.
SHARDINGS = {
    "resharded": ShardingConfig(),
    "not resharded": ShardingConfig(reshard_after_forward=False),
    "kept over two parts": ShardingConfig(resharding_interval=2),
    "gradients of two parts at once": ShardingConfig(gradient_sync_interval=2),
    "both": ShardingConfig(resharding_interval=3, gradient_sync_interval=3),
    "offloaded": ShardingConfig(param_offload=True, optimizer_offload=True),
}
SHARDINGS_OF_TWO = {
    "matrices split": ShardingConfig(tensor_parallel=2),
    "a copy of the weights on each rank": ShardingConfig(shard_size=1),
}
SHARDINGS_OF_FOUR = SHARDINGS_OF_TWO | {
    "two copies with matrices split": ShardingConfig(shard_size=2, tensor_parallel=2),
    "resharded over two ranks": ShardingConfig(reshard_after_forward=2),
    "two copies of the weights": ShardingConfig(shard_size=2),
}


def network(family: str = "qwen2", layers: int = 2, width: int = 64, empty: bool = False) -> PolicyNetwork:
    """A small network, without weights if the first rank broadcasts them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    with torch.device("meta" if empty else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return PolicyNetwork(model, temperature=0.7)


def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, 64, (length,), generator=generator).tolist()

    # Some prompts have two responses.
    prompts, responses = [tokens(2, 9) for _ in range(ROWS)], [tokens(1, 7) for _ in range(ROWS)]
    prompts[1::4] = prompts[::4]
    made = Batch.from_responses(prompts, responses, [[-1.0] * len(response) for response in responses])
    return made.with_(advantages=torch.randn(made.response_mask.shape, generator=generator))


def loss(output: tuple[Tensor, Tensor], part: Batch, count: GlobalCount) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that uses both outputs and is not linear in them."""
    log_probs, entropy = output
    values = log_probs * part.advantages + log_probs.square() / 20 - entropy
    value = aggregate(values, part.response_mask, "token-mean", count)
    return value, {"loss": value}


def out_of_memory(output: object, part: Batch, count: GlobalCount) -> tuple[Tensor, dict[str, Tensor]]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. Of the allocated memory 3 GiB is")


def gradients(
    engine: TrainingEngine, rows: Batch, limit: MicroBatchLimit
) -> tuple[dict[str, Tensor], dict[str, float]]:
    metrics = engine.accumulate_gradients(rows, loss, limit)
    full_gradients = {
        name: weight.grad.full_tensor() for name, weight in engine.network.named_parameters() if weight.grad is not None
    }
    engine.optimizer.zero_grad()
    return full_gradients, metrics


def weights(engine: TrainingEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_weights(engine.network.language_model)}


def sent(engine: TrainingEngine) -> dict[str, Tensor]:
    """The weights in the type of the computation, as engines get them."""
    model, dtype = engine.network.language_model, engine.execution.dtype
    return {name: tensor.to(dtype, copy=True) for name, tensor in engine.full_weights(model, True, dtype)}


def failed_save(state: ShardedState, directory: Path, rank: int) -> tuple[str, str]:
    """The error of a save whose second rank writes to /dev/full, a disk that is always full."""
    if rank == 1:
        directory.mkdir()
        (directory / "__1_0.distcp").symlink_to("/dev/full")
    torch.distributed.barrier()
    state.start_save(directory)
    try:
        state.finish_save(60)
    except CheckpointError as error:
        return str(error), error.hint
    return "", ""


def new_engine(dtype: torch.dtype = torch.float32, **execution: Any) -> TrainingEngine:
    made = Execution(torch.device("cpu"), dtype, **execution)
    return TrainingEngine(network(empty=lacks_weights(made.sharding)), made, SETTINGS)


def lacks_weights(sharding: ShardingConfig) -> bool:
    """Whether this rank receives its weights from the first rank, as in a run."""
    return torch.distributed.get_rank() > 0 and sharding.tensor_parallel == 1


def idle_bytes(engine: TrainingEngine) -> tuple[int, int]:
    """Bytes of weights and optimizer state between two calls."""
    return held_bytes(engine.network.parameters()), held_bytes(optimizer_states(engine.optimizer))


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's shards of some tensors."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.detach().untyped_storage().nbytes() for tensor in local)


def float16_steps(rows: Batch, limit: MicroBatchLimit) -> list[dict[str, float]]:
    """One step, a step whose scaled gradient overflows, and another."""
    engine = new_engine(torch.float16)
    first = engine.update(rows, loss, limit)
    engine.loss_scale.value = 2.0**60
    overflow = engine.update(rows, loss, limit)
    engine.loss_scale.value = 2.0**16
    return [first, overflow, engine.update(rows, loss, limit)]


def adapted_network(empty: bool = False) -> PolicyNetwork:
    """The same network with non-zero adapters."""
    language_model = network(empty=empty).language_model
    add_adapters(language_model, LORA, seed=3)
    generator = torch.Generator().manual_seed(4)
    for _, layer in adapted_layers(language_model):
        layer.lora_B.data.normal_(std=0.1, generator=generator)
    return PolicyNetwork(language_model, temperature=0.7)


def adapted_findings(rows: Batch, limit: MicroBatchLimit, directory: Path) -> dict[str, Any]:
    """Results of a network with adapters before and after two steps, and again from a checkpoint between them."""

    def engine(keeps_start: bool) -> TrainingEngine:
        made = adapted_network(empty=lacks_weights(ShardingConfig()))
        if keeps_start:
            keep_start(made)
        return TrainingEngine(made, Execution(torch.device("cpu"), torch.float32), SETTINGS)

    first, second = engine(False), engine(True)
    results = {"gradients": gradients(first, rows, limit), "log_probs": first.forward(rows, limit)}
    first.update(rows, loss, limit)
    checkpoint = directory / f"adapters_{first.world_size}"
    state = ShardedState(first)
    state.start_save(checkpoint)
    state.finish_save(60)
    ShardedState(second).load(checkpoint)
    results["next"] = [engine.update(rows, loss, limit) for engine in (first, second)]
    results["trained"] = [weights(engine) for engine in (first, second)]
    results["adapter"] = first.adapter_weights(first.network.language_model)
    results["checkpoint names"] = sorted(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    with adapters_off(first.network):
        results["log_probs without"] = first.forward(rows, limit)
    with adapters_off(second.network):
        results["log_probs at the start"] = second.forward(rows, limit)
    return results


def refusal(engine: TrainingEngine, directory: Path) -> str:
    """The error for a network that does not match the checkpoint."""
    try:
        ShardedState(engine).load(directory)
    except CheckpointError as error:
        return str(error)
    return ""


def rows_of_group(sharding: ShardingConfig) -> Batch:
    """The rows of this rank's data group."""
    group, size = torch.distributed.get_rank() // sharding.ranks_per_data_group, sharding.ranks_per_data_group
    share = ROWS * size // torch.distributed.get_world_size()
    return batch().rows(torch.arange(group * share, (group + 1) * share))


def main(rank: int, world_size: int, port: int, directory: Path) -> None:
    join(connect_store("127.0.0.1", port, world_size, 60), rank, world_size, torch.device("cpu"), "127.0.0.1", 60)
    engine = new_engine()
    rows = rows_of_group(ShardingConfig())

    whole, parts, by_tokens = MicroBatchLimit(ROWS), MicroBatchLimit(3), MicroBatchLimit(ROWS, tokens=20)
    result: dict[str, object] = {"log_probs": engine.forward(rows, parts)}
    result["log_probs by tokens"] = engine.forward(rows, by_tokens)
    result["weights"] = weights(engine)
    result["whole"] = gradients(engine, rows, whole)
    result["in parts"] = gradients(engine, rows, parts)
    result["by tokens"] = gradients(engine, rows, by_tokens)
    engine.network.tokens_per_chunk = 2
    result["in chunks"] = gradients(engine, rows, parts)
    result["checkpointed"] = gradients(new_engine(checkpoint_activations=True), rows, parts)
    for name, sharding in (SHARDINGS | {2: SHARDINGS_OF_TWO, 4: SHARDINGS_OF_FOUR}.get(world_size, {})).items():
        other, shared = new_engine(sharding=sharding), rows_of_group(sharding)
        compile_ahead(other, typical_rows(64, 5, 9, 40, share_prompt=True))  # leaves no trace in any of them
        result[name] = gradients(other, shared, parts)
        result[f"{name}, trained"] = [other.update(shared, loss, whole) for _ in range(2)], weights(other)
        result[f"{name}, sent"] = sent(other), weights(other)
        result[f"{name}, log_probs"] = other.forward(shared, parts)
        result[f"{name}, idle bytes"] = idle_bytes(other)
    if world_size == 2:
        plain, split = Execution(torch.device("cpu"), torch.float32), SHARDINGS_OF_TWO["matrices split"]
        for execution in (plain, replace(plain, sharding=split)):
            engine_of_heads = TrainingEngine(network("qwen3"), execution, SETTINGS)
            of_group = rows_of_group(execution.sharding)
            result["norms of heads", execution.sharding.tensor_parallel] = gradients(engine_of_heads, of_group, parts)
    in_16_bits = new_engine(torch.bfloat16)
    result["16 bits, sent"] = sent(in_16_bits), weights(in_16_bits)
    result["lora"] = adapted_findings(rows, parts, directory)
    result["float16"] = float16_steps(rows, whole)

    state = ShardedState(engine)
    if world_size == 2:
        result["first"] = engine.update(rows, loss, whole)
    else:
        state.load(directory / f"of_{CONTINUES[world_size]}")
    state.start_save(directory / f"of_{world_size}")
    result["next"] = [engine.update(rows, loss, whole) for _ in range(2)]  # while the checkpoint is being written
    result["trained"] = weights(engine)
    state.finish_save(60)
    if world_size == 2:
        # Loads the checkpoint into an engine that has trained further: it must repeat the same steps exactly.
        state.load(directory / "of_2")
        result["repeated"] = [engine.update(rows, loss, whole) for _ in range(2)]
        result["retrained"] = weights(engine)
        result["full disk"] = failed_save(state, directory / "full", rank)
        engine.optimizer.param_groups[0]["lr"] = 3e-4
        state.load(directory / "of_2")
        result["learning rate"] = engine.optimizer.param_groups[0]["lr"]
    if world_size == 1:
        result["other networks"] = [
            refusal(TrainingEngine(other, Execution(torch.device("cpu"), torch.float32), SETTINGS), directory / "of_2")
            for other in (network(layers=1), network(layers=3), network(width=32))
        ]
    try:
        engine.update(rows, out_of_memory, whole)
    except WorkerError as error:
        result["shortage"] = (str(error), error.hint)
    if rank == 0:
        torch.save(result, directory / f"world_{world_size}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
