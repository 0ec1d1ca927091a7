"""Rows that ranks and data groups share unequally, for test_data_groups.py: `data_group_program.py DIRECTORY`.

Writes what each layout found to DIRECTORY/world_WORLD_SIZE.pt. All ranks are forks of this process: importing takes
longest.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.trainer.training.loss_program import sampled
from tests.trainer.training.rank_program import loss, network
from tests.trainer.training.ranks import fork_ranks
from trainer.cluster.place import RankPlace
from trainer.config.sections.sharding import ShardingConfig
from trainer.config.tree import Config
from trainer.roles.actor import ActorWorker
from trainer.roles.worker import micro_batch_limit
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.sharding import Execution

# With its default epsilon, AdamW would amplify the rounding of gradients near 0.
SETTINGS = OptimizerSettings(1e-2, 0.0, 1.0, arguments={"eps": 1e-3})


class Rows(NamedTuple):
    """Rows of a step, of a mini-batch, and the actor's other settings."""

    rows: int
    mini_batch: int
    actor: tuple[tuple[str, Any], ...] = (("micro_batch_size", 2),)


SHUFFLED = (("micro_batch_tokens", 20), ("shuffle", True), ("ppo_epochs", 2))
FOUR, TWO, SEVEN, FIVE = Rows(4, 4), Rows(2, 2), Rows(7, 3), Rows(5, 5, SHUFFLED)
# By number of ranks: rows and sharding.
CASES: dict[int, list[tuple[Rows, dict[str, int]]]] = {
    1: [(FOUR, {}), (TWO, {}), (SEVEN, {}), (FIVE, {})],
    2: [(SEVEN, {}), (FIVE, {"tensor_parallel": 2}), (FIVE, {"context_parallel": 2})],
    3: [(FOUR, {}), (SEVEN, {})],
    4: [
        (TWO, {}),
        (TWO, {"shard_size": 2}),
        (SEVEN, {"tensor_parallel": 2}),
        (SEVEN, {"context_parallel": 2}),
        (FIVE, {"context_parallel": 2, "tensor_parallel": 2}),
    ],
}


def found(case: Rows, sharding: dict[str, int]) -> dict[str, Any]:
    """Log-probs in the order of the rows, gradient and metrics of one mini-batch, metrics and weights of a step."""
    settings = ShardingConfig(**sharding)
    actor = {"mini_batch_size": case.rows, "sharding": sharding, **dict(case.actor)}
    sections = {"actor": actor, "critic": {"mini_batch_size": case.rows}, "data": {"train_batch_size": case.rows}}
    config = Config.model_validate(sections)
    worker = ActorWorker(config, RankPlace(dist.get_rank(), dist.get_world_size(), "127.0.0.1", "cpu"))
    execution = Execution(torch.device("cpu"), torch.float32, sharding=settings)
    worker.engine = TrainingEngine(network(), execution, SETTINGS)
    group = dist.get_rank() // settings.ranks_per_data_group
    groups, batch = dist.get_world_size() // settings.ranks_per_data_group, sampled().rows(slice(case.rows))
    shards = batch.shards(groups)
    rows = batch.rows(shards[group].rows)
    metrics = worker.engine.accumulate_gradients(rows, loss, micro_batch_limit(config.actor))
    gradients = {name: weight.grad.full_tensor() for name, weight in worker.engine.network.named_parameters()}
    worker.engine.optimizer.zero_grad()
    log_probs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(log_probs, worker.forward(rows))
    first = torch.cat(log_probs[:: settings.ranks_per_data_group])
    step = batch.shards(groups, case.mini_batch)[group]
    return {
        "log_probs": first[torch.cat([shard.rows for shard in shards]).argsort()],
        "gradients": gradients,
        "metrics": metrics,
        "step": worker.update(batch.rows(step.rows), step.sizes),
        "weights": {name: weight.clone() for name, weight in worker.engine.full_weights(worker.engine.network)},
    }


def run(rank: int, world_size: int, directory: Path) -> None:
    results = [found(case, sharding) for case, sharding in CASES[world_size]]
    if rank == 0:
        torch.save(results, directory / f"world_{world_size}.pt")


def main(directory: Path) -> None:
    for world_size in CASES:
        fork_ranks(run, world_size, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
