"""Megatron's and Transformers' layers on one, two and four ranks, for test_megatron.py:
`megatron_program.py DIRECTORY`.

Writes what rank 0 found to DIRECTORY/world_WORLD_SIZE.pt. All ranks are forks of this process: importing takes longest.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.trainer.models.test_families import small_model
from tests.trainer.training.rank_program import SETTINGS, loss, refusal, rows_of_group, weights
from tests.trainer.training.ranks import fork_ranks
from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.config.sections.sharding import ShardingConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.errors import ConfigError
from trainer.models.backend import training_backend
from trainer.models.megatron_weights import to_transformers
from trainer.models.networks import PolicyNetwork, ValueNetwork
from trainer.training.engine import LossFunction, TrainingEngine
from trainer.training.ranks.sharded_state import ShardedState
from trainer.training.ranks.sharding import Execution

PARTS = MicroBatchLimit(3)
HEADS = "Qwen3"  # a family with weights that all heads share
# By number of ranks: (family, ranks that split a layer). All other ranks compute different rows.
FAMILIES = ("Qwen2 and 2.5", "Qwen3", "Llama 3", "Mistral")
CASES = {
    1: [(family, 1) for family in FAMILIES],
    2: [(HEADS, 1), *((family, 2) for family in FAMILIES)],
    4: [(HEADS, 2)],
}


def language_model(family: str, **more: Any) -> nn.Module:
    """A small model without weights of 0 or 1."""
    model = small_model(family, vocab_size=64, pad_token_id=None, **more)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape)
    return model


def execution(backend: str, split: int = 1, checkpoint_activations: bool = False) -> Execution:
    sharding = ShardingConfig(tensor_parallel=split)
    return Execution(
        torch.device("cpu"), torch.float32, checkpoint_activations, backend=training_backend(backend), sharding=sharding
    )


def actor(family: str, backend: str, split: int = 1, checkpoint_activations: bool = False) -> TrainingEngine:
    network = PolicyNetwork(language_model(family), 0.7)
    return TrainingEngine(network, execution(backend, split, checkpoint_activations), SETTINGS)


def critic(family: str, backend: str, split: int = 1) -> TrainingEngine:
    network = ValueNetwork(language_model(family))
    nn.init.normal_(network.head.weight, std=0.02)
    return TrainingEngine(network, execution(backend, split), SETTINGS)


def squares(values: Tensor, part: Batch, count: GlobalCount) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss in this test."""
    value = aggregate((values - part.advantages).square(), part.response_mask, "token-mean", count)
    return value, {"loss": value}


def found_by(engine: TrainingEngine, rows: Batch, loss_function: LossFunction) -> dict[str, Any]:
    """Outputs, gradients by Transformers' names and, after an optimizer step, its metrics."""
    outputs = engine.forward(rows, PARTS)
    engine.accumulate_gradients(rows, loss_function, PARTS)
    gradients = {
        name: part.clone()
        for parameter_name, weight in engine.network.named_parameters()
        for name, part in to_transformers(parameter_name, weight.grad.full_tensor(), engine.origins)
    }
    engine.optimizer.zero_grad()
    return {"outputs": outputs, "gradients": gradients, "step": engine.update(rows, loss_function, PARTS)}


def saved(engine: TrainingEngine, directory: Path) -> ShardedState:
    state = ShardedState(engine)
    state.start_save(directory)
    state.finish_save(60)
    return state


def continuation(engine: TrainingEngine, rows: Batch) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Two more steps, and the weights after them."""
    return [engine.update(rows, loss, PARTS) for _ in range(2)], weights(engine)


def refused_biases() -> str:
    """The error for a model whose attention output has a bias."""
    network = PolicyNetwork(language_model("Llama 3", attention_bias=True), 0.7)
    try:
        TrainingEngine(network, execution("megatron"), SETTINGS)
    except ConfigError as error:
        return str(error)
    return ""


def run(rank: int, world_size: int, directory: Path) -> None:
    rows = rows_of_group(ShardingConfig())
    of_two = rows_of_group(ShardingConfig(tensor_parallel=2)) if world_size > 1 else rows
    result: dict[Any, Any] = {}
    for family, split in CASES[world_size]:
        for backend in ("fsdp", "megatron") if world_size == 1 else ("megatron",):
            engine = actor(family, backend, split)
            shared = rows if split == 1 else of_two
            before, actor_results = weights(engine), found_by(engine, shared, loss)
            values = found_by(critic(family, backend, split), shared, squares)
            result[family, split, backend] = {
                "actor": actor_results,
                "critic": values,
                "before": before,
                "after": weights(engine),
            }
    if world_size == 1:
        result["checkpointed"] = found_by(actor(HEADS, "megatron", checkpoint_activations=True), rows, loss)
        frozen = TrainingEngine(PolicyNetwork(language_model(HEADS), 0.7), execution("megatron"))
        result["frozen"] = frozen.forward(rows, PARTS)
        result["more biases"] = refused_biases()
        engine = actor(HEADS, "megatron")
        engine.update(rows, loss, PARTS)
        state = saved(engine, directory / "megatron")
        result["next"] = continuation(engine, rows)
        state.load(directory / "megatron")
        result["repeated"] = continuation(engine, rows)
        saved(actor(HEADS, "fsdp"), directory / "fsdp")
        result["fsdp refuses"] = refusal(actor(HEADS, "fsdp"), directory / "megatron")
        result["megatron refuses"] = refusal(actor(HEADS, "megatron"), directory / "fsdp")
    if world_size == 2:
        engine = actor(HEADS, "megatron")
        ShardedState(engine).load(directory / "megatron")
        result["next"] = continuation(engine, rows)
        engine = actor(HEADS, "megatron", split=2)
        result["split refuses"] = refusal(engine, directory / "megatron")
        engine.update(of_two, loss, PARTS)
        saved(engine, directory / "split")
        result["next of split"] = continuation(engine, of_two)
    if world_size == 4:
        engine = actor(HEADS, "megatron", split=2)
        ShardedState(engine).load(directory / "split")
        result["next of split"] = continuation(engine, of_two)
    if rank == 0:
        torch.save(result, directory / f"world_{world_size}.pt")


def main(directory: Path) -> None:
    import trainer.models.megatron  # noqa: F401 - imported before forking; the tests turn its warnings into errors

    for world_size in CASES:
        fork_ranks(run, world_size, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
