"""Passes of a role over a batch, divided among its data groups."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from trainer.cluster.calls import task
from trainer.cluster.workers import WorkerGroup
from trainer.data.batches.batch import Batch
from trainer.runs.efficiency import Efficiency
from trainer.runs.interfaces import TrainedRole

W = TypeVar("W")


class Passes:
    """The passes of a run, each a phase of its step that is timed and measured."""

    def __init__(self, phase: Callable[[str], AbstractContextManager[None]], efficiency: Efficiency) -> None:
        self._phase, self._efficiency = phase, efficiency

    def forward(self, phase: str, group: WorkerGroup[W], method: Callable[[W, Batch], Tensor], batch: Batch) -> Tensor:
        """A forward pass; see `forward`."""
        with self._phase(phase), self._efficiency.computing(phase, group.role, batch):
            return forward(group, method, batch)

    def update(
        self, phase: str, group: WorkerGroup[TrainedRole], batch: Batch, mini_batch_size: int
    ) -> dict[str, float]:
        """A role's optimizer steps; see `update`."""
        with self._phase(phase), self._efficiency.computing(phase, group.role, batch, mini_batch_size):
            return update(group, batch, mini_batch_size)


def forward(group: WorkerGroup[W], method: Callable[[W, Batch], Tensor], batch: Batch) -> Tensor:
    """A forward pass over the batch, a shard per data group: [rows, response length], in the order of the rows."""
    shards, sequences = [shard.rows for shard in batch.shards(group.data_groups)], batch.with_only()
    results = torch.cat(group.call_data_groups(task(method, sequences.rows(rows)) for rows in shards))
    return results[torch.cat(shards).argsort()]


def update(group: WorkerGroup[TrainedRole], batch: Batch, mini_batch_size: int) -> dict[str, float]:
    """A role's optimizer steps on the batch; the metrics of its first rank."""
    shards = batch.shards(group.data_groups, mini_batch_size)
    return group.call_data_groups(task(TrainedRole.update, batch.rows(shard.rows), shard.sizes) for shard in shards)[0]
