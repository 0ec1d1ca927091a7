"""One rank's share of a network under FSDP2: forward passes, optimizer steps, weights and checkpoints."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainer.batch import Batch
from trainer.errors import CheckpointError, EngineError

# (network output, micro-batch, tokens of the global mini-batch) -> loss, and metrics that add up like the loss
LossFunction = Callable[[Any, Batch, int], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: float
    weight_decay: float
    max_gradient_norm: float


class TrainingEngine:
    """A network sharded over all ranks of the default process group.

    Weights and optimizer states stay float32; `dtype` is what activations and gathered weights are computed in.
    """

    def __init__(
        self, network: nn.Module, device: torch.device, dtype: torch.dtype, optimizer: OptimizerSettings | None = None
    ) -> None:
        self.device = device
        self.world_size = dist.get_world_size()
        self.network = shard(network, device, dtype)
        self.settings = optimizer
        if optimizer is None:
            self.network.requires_grad_(False).eval()
            return
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=optimizer.learning_rate, weight_decay=optimizer.weight_decay
        )

    def forward(self, batch: Batch, micro_batch_size: int) -> Tensor:
        """Log-probs or values of all rows, [rows, response length], on CPU. Every rank calls it, with as many rows."""
        with torch.no_grad():
            outputs = [
                self.network(part.token_ids, part.prompt_lengths, part.response_mask)
                for part in map(self._to_device, batch.micro_batches(micro_batch_size))
            ]
        return torch.cat([output[0] if isinstance(output, tuple) else output for output in outputs]).cpu()

    def update(self, batch: Batch, loss_function: LossFunction, micro_batch_size: int) -> dict[str, float]:
        """One optimizer step on this rank's rows of a mini-batch; every rank has equally many.

        Returns the loss function's metrics over the global mini-batch, and `gradient_norm` before clipping.
        """
        metrics = self.accumulate_gradients(batch, loss_function, micro_batch_size)
        norm = self.clip_gradients()
        if not norm < float("inf"):
            raise EngineError(
                f"the gradient norm of {type(self.network).__name__} is {norm}",
                hint="lower the learning rate, or resume from an earlier checkpoint",
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {**metrics, "gradient_norm": norm}

    def accumulate_gradients(
        self, batch: Batch, loss_function: LossFunction, micro_batch_size: int
    ) -> dict[str, float]:
        """Leaves the gradient of the mini-batch's token mean in the parameters, the same for any split of the rows."""
        token_count = int(self._sum_over_ranks(batch.response_mask.sum()))
        totals: dict[str, Tensor] = {}
        for part in map(self._to_device, batch.micro_batches(micro_batch_size)):
            output = self.network(part.token_ids, part.prompt_lengths, part.response_mask)
            loss, metrics = loss_function(output, part, token_count)
            # FSDP averages gradients over the ranks; the loss is already this rank's share of the global mean.
            (loss * self.world_size).backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, torch.zeros(())) + value.detach().double().cpu()
        return {name: float(self._sum_over_ranks(value)) for name, value in totals.items()}

    def clip_gradients(self) -> float:
        """Scales all gradients so that their global L2 norm is at most the limit; returns the norm before."""
        assert self.settings is not None
        norm = nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.max_gradient_norm)
        return float(norm.full_tensor())

    def full_weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Each weight of a part of the network by its name there, gathered. Every rank must exhaust it.

        On a single rank these may be the weights themselves: copy what is to outlast the next update.
        """
        # Between a forward without a backward pass and the next one, FSDP leaves the outermost weights unsharded.
        self.network.reshard()
        for name, tensor in module.state_dict().items():
            yield name, tensor.full_tensor()

    def save(self, directory: Path) -> None:
        """Writes network and optimizer, each rank its shards. Every rank calls it. Raises CheckpointError."""
        try:
            distributed_checkpoint.save(self._state(), checkpoint_id=directory)
        except (distributed_checkpoint.CheckpointException, OSError) as error:
            raise CheckpointError(
                f"{directory}: cannot be written: {error}", hint="check free space and permissions of that directory"
            ) from error

    def load(self, directory: Path) -> None:
        """Continues from what `save` wrote, under any number of ranks. Raises CheckpointError if it is damaged."""
        state = self._state()
        try:
            distributed_checkpoint.load(state, checkpoint_id=directory)
        except (distributed_checkpoint.CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{directory}: cannot be loaded: {error}", hint="resume from another checkpoint of the run"
            ) from error
        set_state_dict(
            self.network, self.optimizer, model_state_dict=state["network"], optim_state_dict=state["optimizer"]
        )

    def _state(self) -> dict[str, Any]:
        network, optimizer = get_state_dict(self.network, self.optimizer)
        return {"network": network, "optimizer": optimizer}

    def _to_device(self, batch: Batch) -> Batch:
        return batch.to(self.device)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total


def shard(network: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Spreads each layer's weights, and the rest as one group, over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in network.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(network, mesh=mesh, mp_policy=policy)
