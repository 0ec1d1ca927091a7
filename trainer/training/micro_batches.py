"""The micro-batches of one rank, and the rows that ranks with split matrix products exchange."""

from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.data.batches.shared_prompts import halved
from trainer.models.packing import PackedRows

# On GPUs the length of a packed line is a multiple of this, so that compiled layers see few lengths.
LENGTH_MULTIPLE = 256


class Layout(Enum):
    """How a network's input holds the rows of a micro-batch."""

    PADDED = auto()  # to one length
    PACKED = auto()  # end to end
    SHARED = auto()  # end to end, a prompt of several rows once


def micro_batches(batch: Batch, limit: MicroBatchLimit, layout: Layout = Layout.PACKED) -> tuple[list[Tensor], Layout]:
    """The rows of each micro-batch, and the layout without SHARED if all prompts differ.

    Every rank gets the same number, as FSDP's collectives require. A padded row counts as much as the longest. Every
    rank of the default process group must call it.
    """
    prompts = batch.shared_prompts()
    if layout is Layout.SHARED and len(prompts.groups) == len(batch):
        layout = Layout.PACKED
    alone = [[row] for row in range(len(batch))]
    groups = prompts.within(limit.tokens) if layout is Layout.SHARED and limit.tokens is not None else alone

    def costs() -> list[int]:
        group_costs = [prompts.cost(group) for group in groups]
        return [max(group_costs)] * len(group_costs) if layout is Layout.PADDED else group_costs

    count = int(reduced(torch.tensor(limit.parts_needed(costs())), dist.ReduceOp.MAX))
    groups = halved(groups, count)
    parts = limit.split(costs(), count)
    return [torch.tensor(sorted(row for number in part for row in groups[number])) for part in parts], layout


def rows_of_group(batch: Batch, group: dist.ProcessGroup | None) -> tuple[Batch, slice]:
    """The rows of all ranks in a group, and where this rank's rows are among them. Without a group, its own rows."""
    if group is None:
        return batch, slice(None)
    batches: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(batches, batch, group)
    start = dist.get_rank(group) * len(batch)
    return Batch.joined(batches), slice(start, start + len(batch))


def pack(batch: Batch, device: torch.device, layout: Layout) -> PackedRows:
    """The rows of a micro-batch, packed, on the device."""
    multiple = LENGTH_MULTIPLE if device.type == "cuda" else 1
    return PackedRows.of(batch, multiple, share_prompts=layout is Layout.SHARED).to(device)


def reduced(value: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """A copy of a CPU tensor, reduced over all ranks."""
    total = value.clone()
    dist.all_reduce(total, operation)
    return total
