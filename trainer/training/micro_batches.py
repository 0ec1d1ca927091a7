"""The micro-batches of one rank."""

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

    Every rank gets the same number, as FSDP's collectives require: if it has too few rows, some without any. A padded
    row counts as much as the longest. Every rank of the default process group must call it.
    """
    prompts = batch.shared_prompts()
    if layout is Layout.SHARED and len(prompts.groups) == len(batch):
        layout = Layout.PACKED
    alone = [[row] for row in range(len(batch))]
    groups = prompts.within(limit.tokens) if layout is Layout.SHARED and limit.tokens is not None else alone

    def costs() -> list[int]:
        group_costs = [prompts.cost(group) for group in groups]
        return [max(group_costs, default=0)] * len(group_costs) if layout is Layout.PADDED else group_costs

    count = int(reduced(torch.tensor(limit.parts_needed(costs())), dist.ReduceOp.MAX))
    with_rows = min(count, len(batch))
    groups = halved(groups, with_rows)
    parts = limit.split(costs(), with_rows) if with_rows else []
    parts += [[]] * (count - len(parts))
    chosen = [sorted(row for number in part for row in groups[number]) for part in parts]
    return [torch.tensor(rows, dtype=torch.int64) for rows in chosen], layout


def rows_of(batch: Batch, part: Tensor) -> Batch:
    """The rows of a micro-batch; a masked row in one without rows, so that its pass has the collectives of all others.

    No loss or metric changes by it.
    """
    return batch.rows(part) if len(part) else batch.masked_row()


def pack(batch: Batch, device: torch.device, layout: Layout, ranks: int = 1) -> PackedRows:
    """The rows of a micro-batch, packed, on the device. `ranks` compute a part of each row's tokens."""
    multiple = (LENGTH_MULTIPLE if device.type == "cuda" else 1) * ranks
    return PackedRows.of(batch, multiple, share_prompts=layout is Layout.SHARED).to(device)


def reduced(value: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """A copy of a CPU tensor, reduced over all ranks."""
    total = value.clone()
    dist.all_reduce(total, operation)
    return total
