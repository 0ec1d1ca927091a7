"""One rank that differentiates every loss, for test_sharding.py: `loss_program.py RANK WORLD_SIZE PORT DIRECTORY`.

Writes the gradients of each case to DIRECTORY/losses_WORLD_SIZE.pt on rank 0.
"""

import itertools
import sys
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from tests.trainer.training.rank_program import ROWS, batch, network
from trainer.algorithms.losses.aggregation import Aggregation
from trainer.algorithms.registry import POLICY_LOSSES
from trainer.cluster.place import RankPlace
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.roles.actor import ActorWorker
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.process_group import connect_store, join
from trainer.training.ranks.sharding import Execution

MODES = get_args(Aggregation)
# Losses that depend on the other rows of their micro-batch also depend on how rows are split.
SPLITTABLE = [row.name for row in POLICY_LOSSES.values() if not row.per_micro_batch]
CASES = [("ppo", mode) for mode in MODES] + [(name, "seq-mean-token-mean") for name in SPLITTABLE if name != "ppo"]
# Bounds that some tokens of these rows exceed.
NARROW = {"dppo_tv": {"clip_ratio": 2e-3}, "dppo_kl": {"clip_ratio": 2e-4}}
MICRO_BATCHES = (1, 3, ROWS)
FAILED = (0, 3, 4, ROWS - 1)  # rows of a batch in which some responses failed


def sampled() -> Batch:
    """Rows as in a step: old and reference log-probs near the network's, and correction weights."""
    made, generator = batch(), torch.Generator().manual_seed(2)

    def near(centre: float, spread: float) -> Tensor:
        return centre + spread * torch.randn(made.response_mask.shape, generator=generator)

    return made.with_(old_log_probs=near(-4.2, 0.3), reference_log_probs=near(-4.2, 0.3), corrections=near(1.0, 0.1))


def answered() -> Tensor:
    """Which rows have not failed, [rows] bool."""
    return torch.isin(torch.arange(ROWS), torch.tensor(FAILED), invert=True)


def worker(policy_loss: str, mode: str, world_size: int) -> ActorWorker:
    settings = {
        "policy_loss": policy_loss,
        "loss_aggregation": mode,
        "entropy_coefficient": 0.01,
        "kl_loss_coefficient": 0.1,
        **NARROW.get(policy_loss, {}),
    }
    return ActorWorker(Config.model_validate({"actor": settings}), RankPlace(0, world_size, "127.0.0.1", "cpu"))


def main(rank: int, world_size: int, port: int, directory: Path) -> None:
    join(connect_store("127.0.0.1", port, world_size, 60), rank, world_size, torch.device("cpu"), "127.0.0.1", 60)
    engine = TrainingEngine(network(), Execution(torch.device("cpu"), torch.float32), OptimizerSettings(1e-2, 0.0, 1.0))
    whole = sampled()
    rows = whole.rows(whole.shards(world_size)[rank].rows)
    results: dict[tuple[str, str, int], tuple[dict[str, Tensor], dict[str, float]]] = {}
    for (policy_loss, mode), size in itertools.product(CASES, MICRO_BATCHES):
        metrics = engine.accumulate_gradients(rows, worker(policy_loss, mode, world_size).loss, MicroBatchLimit(size))
        gradients = {name: weight.grad.full_tensor() for name, weight in engine.network.named_parameters()}
        results[policy_loss, mode, size] = gradients, metrics
        engine.optimizer.zero_grad()
    failed = whole.with_(response_mask=whole.response_mask & answered().unsqueeze(1), counted=answered())
    for (name, part), mode in itertools.product((("failed", failed), ("alone", whole.rows(answered()))), MODES):
        rows = part.rows(part.shards(world_size)[rank].rows)
        metrics = engine.accumulate_gradients(rows, worker("ppo", mode, world_size).loss, MicroBatchLimit(3))
        gradients = {name: weight.grad.full_tensor() for name, weight in engine.network.named_parameters()}
        results[name, mode, 3] = gradients, metrics
        engine.optimizer.zero_grad()
    if rank == 0:
        torch.save(results, directory / f"losses_{world_size}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
