"""One rank's share of a network under FSDP2: forward passes, optimizer steps and weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.algorithms.aggregation import GlobalCount
from trainer.data.batch import Batch
from trainer.data.copies import to_device
from trainer.data.partition import MicroBatchLimit
from trainer.errors import WorkerError
from trainer.models.lora import adapted_layers, adapter_weights
from trainer.models.megatron_weights import to_transformers
from trainer.models.packing import PackedRows
from trainer.models.tensor_parallel import add_gradients_of_heads
from trainer.training.allocator import give_back_memory
from trainer.training.first_rank import hand_out, some_rank_is_empty, whole_tensors
from trainer.training.garbage import collect_garbage
from trainer.training.gradients import global_norm, gradients_of, scale
from trainer.training.loss_scale import LossScale
from trainer.training.offload import Offload
from trainer.training.sharding import TENSOR, Execution, device_mesh, reshard, shard, sharded_modules

# (network output, micro-batch, what the global mini-batch holds) -> loss, and metrics; both add up over the parts
LossFunction = Callable[[Any, Batch, GlobalCount], tuple[Tensor, dict[str, Tensor]]]

# On GPUs packed lines are filled up to a multiple of this: compiled layers then meet few lengths.
LENGTH_MULTIPLE = 256


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: float
    weight_decay: float
    max_gradient_norm: float
    skip_non_finite: bool = False


class TrainingEngine:
    """A network sharded over the ranks of the default process group.

    Trained weights and optimizer states stay float32; `execution` says what activations are computed in, and how.
    What it offloads comes and goes with each method; `stepping` around several of them keeps it.
    """

    def __init__(self, network: nn.Module, execution: Execution, optimizer: OptimizerSettings | None = None) -> None:
        self.execution = execution
        self.device = execution.device
        self.world_size = dist.get_world_size()
        self.settings = optimizer
        if optimizer is None:
            network.requires_grad_(False).eval()
        mesh = device_mesh(execution)
        whole = whole_tensors(network) if some_rank_is_empty(network) else None
        self.network = shard(network, execution, mesh)
        if whole is not None:
            hand_out(self.network, whole, self.device)
        # The ranks that split matrix products with this one, and how many such groups there are.
        self.peers = mesh[TENSOR].get_group() if TENSOR in mesh.mesh_dim_names else None
        self.groups = self.world_size // execution.sharding.tensor_parallel
        self._holds_whole_weights = (execution.sharding.shard_size or self.world_size) == 1
        # Looked for once: a walk through all modules takes a millisecond.
        self._sharded_modules = sharded_modules(self.network)
        self._has_adapters = any(adapted_layers(self.network))
        # How the weights of the backend's layers map to Transformers' weights.
        self._origins = execution.backend.origins(self.network.decoder.config, execution.sharding.tensor_parallel)
        self.loss_scale = LossScale.of(execution.dtype)
        offloads = execution.sharding
        self._weights = Offload(self.network.parameters if offloads.param_offload else list)
        if optimizer is None:
            return
        # Kernels over many tensors at once cannot mix weights that are split with those that are not.
        self._kernels = {
            "fused": self.device.type == "cuda" and self.peers is None,
            "foreach": None if self.peers is None else False,
        }
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.network.parameters() if parameter.requires_grad],
            lr=optimizer.learning_rate,
            weight_decay=optimizer.weight_decay,
            **self._kernels,
        )
        self._states = Offload(partial(optimizer_states, self.optimizer) if offloads.optimizer_offload else list)

    @contextmanager
    def stepping(self, several: bool = True) -> Iterator[None]:
        """Keeps weights and the optimizer's states on the device for all updates within, then gives memory back.

        A single update has room for the states once it has let go of its activations: so long they stay away.
        """
        with self._weights.needed(written=True), self._states.needed(written=True) if several else nullcontext():
            yield
        self.release_memory()

    @property
    def split_ranks(self) -> int | None:
        """How many ranks split the backend's layers, if a checkpoint can only be loaded with the same number.

        None if weights are stored as Transformers names them: any number of ranks can then load them.
        """
        return self.execution.sharding.tensor_parallel if self._origins else None

    def forward(self, batch: Batch, limit: MicroBatchLimit) -> Tensor:
        """Log-probs or values of all rows, [rows, response length], on CPU. Every rank calls it."""
        batch, own = self._with_peers(batch)
        result = torch.zeros(batch.response_mask.shape, dtype=torch.float32, device=self.device)
        with torch.no_grad(), _explained_shortage(), self._weights.needed(written=False):
            for rows in self._micro_batches(batch, limit):
                output = self.network(self._pack(batch.rows(rows)))
                # Rows that lie on CPU would make the CPU wait for the GPU before it begins the next part.
                result[to_device(rows, self.device)] = output[0] if isinstance(output, tuple) else output
            found = result[own].cpu()
            reshard(self._sharded_modules)
        self.release_memory()
        return found

    def update(self, batch: Batch, loss_function: LossFunction, limit: MicroBatchLimit) -> dict[str, float]:
        """One optimizer step on this rank's rows of a mini-batch.

        Returns the loss function's metrics over the global mini-batch, `gradient_norm` before clipping, and `skipped`,
        1 if that norm is no finite number and the optimizer step was therefore left out. Raises WorkerError for such a
        norm if it is not to be skipped and, in float16, a smaller loss scale cannot help.
        """
        assert self.settings is not None
        with self._weights.needed(written=True):
            with _explained_shortage():
                metrics = self.accumulate_gradients(batch, loss_function, limit)
                norm = self.clip_gradients()
            finite = norm < float("inf")
            if not self.loss_scale.accepts(finite) and not self.settings.skip_non_finite:
                raise WorkerError(
                    f"the gradient norm of {type(self.network).__name__} is {norm}",
                    hint="lower the learning rate, or resume from an earlier checkpoint",
                )
            if finite:
                self._step()
            self.optimizer.zero_grad()
        if self.loss_scale.dynamic:
            metrics["loss_scale"] = self.loss_scale.value
        # A norm that is no number would hide the others' mean; the share of skipped steps says that there was one.
        return {**metrics, "gradient_norm": norm if finite else 0.0, "skipped": float(not finite)}

    def _step(self) -> None:
        if not self.optimizer.state:
            # Made now, they would settle in the memory that activations left, and keep it whole.
            self.release_memory()
        with _explained_shortage(), self._states.needed(written=True):
            self.optimizer.step()
        if self.device.type == "cuda":
            # The gradients are freed next; where memory is short, their pages would be taken away while they are read.
            torch.cuda.synchronize()

    def accumulate_gradients(
        self, batch: Batch, loss_function: LossFunction, limit: MicroBatchLimit
    ) -> dict[str, float]:
        """Leaves the gradient of the global mini-batch's loss in the parameters, the same for any split of the rows.

        In float16 it is the gradient times the loss scale.
        """
        mask = batch.response_mask
        count = GlobalCount(*self._reduce(torch.stack([mask.sum(), mask.any(dim=1).sum()])).tolist())
        totals: dict[str, Tensor] = {}
        batch, _ = self._with_peers(batch)
        parts = self._micro_batches(batch, limit)
        with self._weights.needed(written=False):
            for number, rows in enumerate(parts, start=1):
                self._schedule_traffic(number, last=number == len(parts))
                part = batch.rows(rows)
                loss, metrics = loss_function(self.network(self._pack(part)), part.to(self.device), count)
                # FSDP averages gradients over the groups; the loss is already this group's share of the global loss.
                (loss * (self.groups * self.loss_scale.value)).backward()
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value.detach().double()
        if self.peers is not None:
            add_gradients_of_heads(self.network.decoder.layers, self.peers)
        # Read once at the end: each look at a number on a GPU would wait for all work before it.
        sums = self._reduce(torch.stack(list(totals.values())).cpu()) * (self.groups / self.world_size)
        return dict(zip(totals, sums.tolist(), strict=True))

    def _schedule_traffic(self, number: int, last: bool) -> None:
        """Says what FSDP does after the backward pass of a micro-batch. Alone, a rank has nothing to gather: weights
        stay as they are, and gradients add up in place."""
        sharding = self.execution.sharding

        def due(interval: int) -> bool:
            return last or (self.groups > 1 and number % interval == 0)

        self.network.set_requires_gradient_sync(due(sharding.gradient_sync_interval))
        self.network.set_reshard_after_backward(due(sharding.resharding_interval))

    def _micro_batches(self, batch: Batch, limit: MicroBatchLimit) -> list[Tensor]:
        """The rows of each part; every rank gets as many parts, as FSDP's collectives need."""
        lengths = batch.lengths.tolist()
        count = int(self._reduce(torch.tensor(limit.parts_needed(lengths)), dist.ReduceOp.MAX))
        return [torch.tensor(part) for part in limit.split(lengths, count)]

    def _with_peers(self, batch: Batch) -> tuple[Batch, slice]:
        """The rows of all ranks that compute together with this one, and where its own are among them."""
        if self.peers is None:
            return batch, slice(None)
        batches: list[Any] = [None] * dist.get_world_size(self.peers)
        dist.all_gather_object(batches, batch, self.peers)
        start = dist.get_rank(self.peers) * len(batch)
        return Batch.joined(batches), slice(start, start + len(batch))

    def _pack(self, part: Batch) -> PackedRows:
        multiple = LENGTH_MULTIPLE if self.device.type == "cuda" else 1
        return PackedRows.of(part, multiple).to(self.device)

    def release_memory(self) -> None:
        """Looks for garbage, and leaves what torch keeps in store for the next pass to other processes on this GPU."""
        collect_garbage()
        if self.execution.shares_gpu:
            give_back_memory()

    def clip_gradients(self) -> float:
        """Scales all gradients so that their global L2 norm is at most the limit; returns the norm before.

        Takes the loss scale off.
        """
        assert self.settings is not None
        gradients = gradients_of(self.network.parameters())
        norm = global_norm(gradients) / self.loss_scale.value
        scale(gradients, min(1.0, self.settings.max_gradient_norm / (norm + 1e-6)) / self.loss_scale.value)
        return norm

    def full_weights(self, module: nn.Module, shared_once: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Each weight of a part of the network by its name there, gathered, adapters merged in, those of Megatron's
        layers as Transformers names them. Every rank must exhaust it.

        A weight that two parts share comes under both names, or once. A rank that holds whole weights gives these
        themselves, unless they are offloaded: copy what is to outlast the next update.
        """
        reshard(self._sharded_modules)
        layers = adapted_layers(module) if self._has_adapters else ()
        adapted = {f"{name}.weight": layer for name, layer in layers}
        own = {id(part) for layer in adapted.values() for part in (layer.lora_A, layer.lora_B)}
        with self._weights.needed(written=False), torch.no_grad():
            for name, weight in module.named_parameters(remove_duplicate=shared_once):
                if name in adapted:
                    yield name, adapted[name].merged(self._gather)
                elif id(weight) not in own:
                    yield from to_transformers(name, self._gather(weight), self._origins)

    def adapter_weights(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """The adapters of a part of the network, gathered, named as peft names them. Every rank calls it."""
        reshard(self._sharded_modules)
        with self._weights.needed(written=False):
            return [(name, tensor.clone()) for name, tensor in adapter_weights(module, self._gather)]

    def _gather(self, weight: DTensor) -> Tensor:
        if not self._holds_whole_weights:
            return weight.full_tensor()
        return weight.to_local().clone() if self.execution.sharding.param_offload else weight.to_local()

    def _reduce(self, value: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """A tensor on CPU, reduced over the ranks."""
        total = value.clone()
        dist.all_reduce(total, operation)
        return total


def optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor that an optimizer keeps."""
    for states in optimizer.state.values():
        yield from (state for state in states.values() if isinstance(state, Tensor))


@contextmanager
def _explained_shortage() -> Iterator[None]:
    """Turns torch's OutOfMemoryError into a WorkerError that says what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise WorkerError(
            f"the GPU's memory is full: {str(error).split('. Of the allocated')[0]}",
            hint="lower micro_batch_tokens (or micro_batch_size), or set sharding.optimizer_offload=true or "
            "activation_checkpointing=true, of the actor or the critic; see docs/guides/tuning.md",
        ) from error
