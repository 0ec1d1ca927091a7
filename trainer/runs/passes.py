"""Passes of a role over a batch, divided among its data groups."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from trainer.cluster.calls import task
from trainer.cluster.workers import WorkerGroup
from trainer.data.batches.batch import Batch
from trainer.data.batches.routes import Routes
from trainer.runs.efficiency import Efficiency
from trainer.runs.interfaces import ActorRole, TrainedRole

W = TypeVar("W")
R = TypeVar("R")


class Passes:
    """The passes of a run, each a phase of its step that is timed and measured."""

    def __init__(self, phase: Callable[[str], AbstractContextManager[None]], efficiency: Efficiency) -> None:
        self._phase, self._efficiency = phase, efficiency

    def forward(
        self,
        phase: str,
        group: WorkerGroup[W],
        method: Callable[[W, Batch], Tensor],
        batch: Batch,
        reads: Sequence[str] = (),
    ) -> Tensor:
        """A forward pass; see `forward`."""
        with self._phase(phase), self._efficiency.computing(phase, group.role, batch):
            return forward(group, method, batch, reads)

    def forward_recording(self, phase: str, group: WorkerGroup[ActorRole], batch: Batch) -> tuple[Tensor, Routes]:
        """Log-probs, as `forward` returns them, and the experts that tokens chose."""
        with self._phase(phase), self._efficiency.computing(phase, group.role, batch):
            order, results = _by_data_group(group, ActorRole.log_probs_and_routes, batch)
            segments = [parts for _, routes in results for parts in routes.segments]
            return torch.cat([log_probs for log_probs, _ in results])[order], Routes(segments).rows(order.tolist())

    def update(
        self, phase: str, group: WorkerGroup[TrainedRole], batch: Batch, mini_batch_size: int
    ) -> dict[str, float]:
        """A role's optimizer steps; see `update`."""
        with self._phase(phase), self._efficiency.computing(phase, group.role, batch, mini_batch_size):
            return update(group, batch, mini_batch_size)


def forward(
    group: WorkerGroup[W], method: Callable[[W, Batch], Tensor], batch: Batch, reads: Sequence[str] = ()
) -> Tensor:
    """A forward pass over the batch, a shard per data group: [rows, response length], in the order of the rows.

    `reads` are the fields of the batch that it reads, besides the tokens.
    """
    order, results = _by_data_group(group, method, batch, reads)
    return torch.cat(results)[order]


def _by_data_group(
    group: WorkerGroup[W], method: Callable[[W, Batch], R], batch: Batch, reads: Sequence[str] = ()
) -> tuple[Tensor, list[R]]:
    """What each data group returns for its rows, and where the rows of the batch are among those of all groups."""
    shards, sequences = [shard.rows for shard in batch.shards(group.data_groups)], batch.with_only(*reads)
    results = group.call_data_groups(task(method, sequences.rows(rows)) for rows in shards)
    return torch.cat(shards).argsort(), results


def update(group: WorkerGroup[TrainedRole], batch: Batch, mini_batch_size: int) -> dict[str, float]:
    """A role's optimizer steps on the batch; the metrics of its first rank."""
    shards = batch.shards(group.data_groups, mini_batch_size)
    return group.call_data_groups(task(TrainedRole.update, batch.rows(shard.rows), shard.sizes) for shard in shards)[0]
