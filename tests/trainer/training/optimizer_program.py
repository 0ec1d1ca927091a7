"""One rank that trains with every optimizer, for test_optimizers.py: `optimizer_program.py RANK SIZE PORT DIRECTORY`.

Rank 0 writes what it found to DIRECTORY/found.pt.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.trainer.training.rank_program import ROWS, batch, idle_bytes, loss, network, weights
from trainer.algorithms.optimization.optimizers import OPTIMIZERS
from trainer.config.sections.optimization import OptimizerConfig, ScheduleConfig
from trainer.config.sections.sharding import ShardingConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.errors import CheckpointError
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.process_group import connect_store, join
from trainer.training.ranks.sharded_state import ShardedState
from trainer.training.ranks.sharding import Execution

UPDATES = 4
SCHEDULE = ScheduleConfig(name="cosine", warmup_steps=1, min_ratio=0.1)
# Settings that use every state of an optimizer.
CHOSEN: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.8, 0.95), "epsilon": 1e-6, "amsgrad": True},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "rmsprop": {"momentum": 0.5, "centered": True},
    "adagrad": {"learning_rate_decay": 0.1, "initial_accumulator": 0.1},
}
CASES = {name: OptimizerConfig(name=name, **CHOSEN.get(name, {})) for name in OPTIMIZERS}
CASES["sgd without momentum"] = OptimizerConfig(name="sgd")
CASES["adamw, decay of matrices only"] = OptimizerConfig(name="adamw", decay_biases_and_norms=False)


def new_engine(config: OptimizerConfig, dtype: torch.dtype = torch.float32, **sharding: Any) -> TrainingEngine:
    settings = OptimizerSettings(
        1e-2,
        0.1,
        0.5,
        kind=OPTIMIZERS[config.name],
        arguments=config.arguments,
        factor=lambda update: SCHEDULE.factor(update, UPDATES),
        decay_vectors=config.decay_biases_and_norms,
    )
    execution = Execution(torch.device("cpu"), dtype, sharding=ShardingConfig(**sharding))
    return TrainingEngine(network().to(dtype), execution, settings)


def train(engine: TrainingEngine, rows: Batch, updates: int) -> tuple[list[float], list[dict[str, float]]]:
    """The learning rate and the metrics of each update."""
    rates, metrics = [], []
    for _ in range(updates):
        with engine.updating() as rate:
            metrics.append(engine.update(rows, loss, MicroBatchLimit(ROWS)))
        rates.append(rate)
    return rates, metrics


def plain_weights(engine: TrainingEngine, config: OptimizerConfig, rows: Batch) -> dict[str, Tensor]:
    """The weights after torch's optimizer took the engine's gradients on a whole network on one rank.

    The learning rates are those of torch's own scheduler.
    """
    whole = network()
    kind = getattr(torch.optim, OPTIMIZERS[config.name].torch)
    decays = [0.1 if config.decay_biases_and_norms or weight.ndim > 1 else 0.0 for weight in whole.parameters()]
    groups = [{"params": [weight], "weight_decay": d} for weight, d in zip(whole.parameters(), decays, strict=True)]
    optimizer = kind(groups, lr=1e-2, **config.arguments)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: SCHEDULE.factor(update, UPDATES))

    def follow(*_: object) -> None:
        for parameter, sharded in zip(whole.parameters(), engine.network.parameters(), strict=True):
            parameter.grad = sharded.grad.full_tensor()
        optimizer.step()
        scheduler.step()

    engine.optimizer.register_step_pre_hook(follow)
    train(engine, rows, UPDATES)
    return {name: weight.detach() for name, weight in whole.language_model.named_parameters()}


def findings(config: OptimizerConfig, rows: Batch, directory: Path) -> dict[str, Any]:
    uninterrupted = new_engine(config)
    results: dict[str, Any] = {"plain": plain_weights(uninterrupted, config, rows), "trained": weights(uninterrupted)}
    repeated = new_engine(config)
    results["rates"], results["metrics"] = train(repeated, rows, UPDATES)
    first, second = new_engine(config), new_engine(config)
    train(first, rows, 2)
    state = ShardedState(first)
    state.start_save(directory)
    state.finish_save(60)
    ShardedState(second).load(directory)
    results["resumed rates"], results["resumed metrics"] = train(second, rows, UPDATES - 2)
    results["resumed"] = weights(second)
    offloaded = new_engine(config, param_offload=True, optimizer_offload=True)
    train(offloaded, rows, UPDATES)
    results["idle bytes"], results["offloaded"] = idle_bytes(offloaded), weights(offloaded)
    return results


def refusal(directory: Path, config: OptimizerConfig) -> str:
    try:
        ShardedState(new_engine(config)).load(directory)
    except CheckpointError as error:
        return str(error)
    return ""


def main(rank: int, world_size: int, port: int, directory: Path) -> None:
    join(connect_store("127.0.0.1", port, world_size, 60), rank, world_size, torch.device("cpu"), "127.0.0.1", 60)
    share = ROWS // world_size
    rows = batch().rows(torch.arange(rank * share, (rank + 1) * share))
    results: dict[str, Any] = {name: findings(config, rows, directory / name) for name, config in CASES.items()}
    results["of adamw"] = refusal(directory / "adamw", CASES["sgd without momentum"])
    half = new_engine(CASES["adamw"], torch.bfloat16, gradient_dtype="bfloat16")
    _, results["bfloat16"] = train(half, rows, UPDATES)
    kept = [state for states in half.optimizer.state.values() for name, state in states.items() if name != "step"]
    results["bfloat16 types"] = {tensor.dtype for tensor in (*half.network.parameters(), *kept)}
    if rank == 0:
        torch.save(results, directory / "found.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
