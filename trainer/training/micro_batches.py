"""The micro-batches of one rank, and the rows that ranks with split matrix products exchange."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.packing import PackedRows

# On GPUs the length of a packed line is a multiple of this, so that compiled layers see few lengths.
LENGTH_MULTIPLE = 256


def micro_batches(batch: Batch, limit: MicroBatchLimit, padded: bool = False) -> list[Tensor]:
    """The rows of each micro-batch. Every rank gets the same number, as FSDP's collectives require.

    With `padded`, the network pads rows to one length, and every row counts as much as the longest. Every rank of the
    default process group must call it.
    """
    lengths = batch.lengths.tolist()
    if padded:
        lengths = [max(lengths)] * len(lengths)
    count = int(reduced(torch.tensor(limit.parts_needed(lengths)), dist.ReduceOp.MAX))
    return [torch.tensor(part) for part in limit.split(lengths, count)]


def rows_of_group(batch: Batch, group: dist.ProcessGroup | None) -> tuple[Batch, slice]:
    """The rows of all ranks in a group, and where this rank's rows are among them. Without a group, its own rows."""
    if group is None:
        return batch, slice(None)
    batches: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(batches, batch, group)
    start = dist.get_rank(group) * len(batch)
    return Batch.joined(batches), slice(start, start + len(batch))


def pack(batch: Batch, device: torch.device) -> PackedRows:
    """The rows of a micro-batch, packed, on the device."""
    return PackedRows.of(batch, LENGTH_MULTIPLE if device.type == "cuda" else 1).to(device)


def reduced(value: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """A copy of a CPU tensor, reduced over all ranks."""
    total = value.clone()
    dist.all_reduce(total, operation)
    return total
