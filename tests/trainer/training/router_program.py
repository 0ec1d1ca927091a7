"""Routers of ranks that share rows or have rows of their own, for test_routers.py: `router_program.py DIRECTORY`.

Writes what each layout found to DIRECTORY/world_WORLD_SIZE.pt. All ranks are forks of this process.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.trainer.models.expert_families import ROUTED
from tests.trainer.models.test_log_probs_by_family import language_model, rows
from tests.trainer.training.ranks import fork_ranks
from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.config.sections.sharding import ShardingConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.data.batches.routes import Routes, Segment
from trainer.models.networks import PolicyNetwork
from trainer.models.routers import RouterLosses
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.sharding import Execution

SETTINGS = OptimizerSettings(1e-2, 0.0, 1.0, arguments={"eps": 1e-3})
FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
# By number of ranks: sharding, rows of a micro-batch, and whether layers are computed again.
LAYOUTS: dict[int, dict[str, tuple[dict[str, int], int, bool]]] = {
    1: {"whole": ({}, 7, False), "micro-batches": ({}, 2, False), "computed again": ({}, 2, True)},
    2: {"rows divided": ({}, 2, False), "rows shared": ({"context_parallel": 2}, 3, False)},
}
LOSSES = RouterLosses(aux=0.3, z=0.02)


def loss(output: tuple[Tensor, Tensor], batch: Batch, count: GlobalCount) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs, entropy = output
    value = aggregate(log_probs + log_probs.square() / 20 - entropy, batch.response_mask, "token-mean", count)
    return value, {"loss": value}


def moved(routes: Routes, experts: int) -> Routes:
    """Other choices."""
    return Routes([[Segment(part.first, (part.choices + 1) % experts) for part in parts] for parts in routes.segments])


def results_of(family: str, sharding: dict[str, int], limit: int, again: bool) -> dict[str, Any]:
    """What is recorded, and metrics and gradients of a mini-batch with the own choices and with others, and of the
    losses that balance."""
    settings = ShardingConfig(**sharding)
    execution = Execution(torch.device("cpu"), torch.float32, sharding=settings, checkpoint_activations=again)
    engine = TrainingEngine(PolicyNetwork(language_model(*ROUTED[family]), 0.7), execution, SETTINGS)
    groups, group = dist.get_world_size() // settings.ranks_per_data_group, dist.get_rank()
    shards = rows().shards(groups)
    index = shards[group // settings.ranks_per_data_group].rows
    batch, most = rows().rows(index), MicroBatchLimit(limit)
    recorded: list[Routes] = []
    log_probs = engine.forward(batch, most, recorded)
    segments = [[(part.first, torch.from_numpy(part.choices)) for part in parts] for parts in recorded[0].segments]
    others = batch.with_(routes=moved(recorded[0], engine.network.routers.experts))
    parts = {
        "rows": index,
        "log-probs": log_probs,
        "segments": segments,
        "log-probs of others": engine.forward(others, most),
        "own": update(engine, batch, most),
        "others": update(engine, others, most),
    }
    engine.network.routers.coefficients = LOSSES
    parts["with losses"] = update(engine, batch, most)
    parts["with losses of others"] = update(engine, others, most)
    return parts


def update(engine: TrainingEngine, batch: Batch, limit: MicroBatchLimit) -> dict[str, Any]:
    metrics = engine.accumulate_gradients(batch, loss, limit)
    gradients = {name: weight.grad.full_tensor().clone() for name, weight in engine.network.named_parameters()}
    engine.optimizer.zero_grad()
    return {"metrics": metrics, "gradients": gradients}


def run(rank: int, world_size: int, directory: Path) -> None:
    results = {
        (family, name): results_of(family, *layout)
        for family in FAMILIES
        for name, layout in LAYOUTS[world_size].items()
    }
    everything: list[Any] = [None] * world_size
    dist.all_gather_object(everything, results)
    if rank == 0:
        torch.save(everything, directory / f"world_{world_size}.pt")


def main(directory: Path) -> None:
    for world_size in LAYOUTS:
        fork_ranks(run, world_size, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
