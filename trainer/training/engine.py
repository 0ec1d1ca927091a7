"""One rank's shard of a network under FSDP2: forward passes, optimizer steps and weights."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.algorithms.losses.aggregation import GlobalCount
from trainer.algorithms.optimization.optimizers import OPTIMIZERS, Optimizer
from trainer.cluster.garbage import collect_garbage
from trainer.data.batches.batch import Batch
from trainer.data.batches.copies import to_device
from trainer.data.batches.partition import MicroBatchLimit
from trainer.data.batches.routes import Choices, Routes, Segment, smallest_type
from trainer.errors import MemoryFullError, WorkerError
from trainer.models.lora import adapted_layers, adapter_weights
from trainer.models.megatron_weights import to_transformers
from trainer.models.networks import is_packed
from trainer.models.packing import routes_of_rows
from trainer.models.tensor_parallel import add_gradients_of_heads
from trainer.training.loss_scale import LossScale
from trainer.training.memory.aborted_pass import discard_pass
from trainer.training.memory.allocator import give_back_memory
from trainer.training.memory.offload import Offload
from trainer.training.micro_batches import Layout, micro_batches, pack, reduced, rows_of
from trainer.training.non_finite import FaultFiles
from trainer.training.ranks.loading import take_weights
from trainer.training.ranks.sharding import (
    TENSOR,
    Execution,
    compiles,
    context_group,
    device_mesh,
    gathered_by_unit,
    reshard,
    shard,
    sharded_modules,
)

# (network output, micro-batch, counts of the global mini-batch) -> loss and metrics; both are summed over micro-batches
LossFunction = Callable[[Any, Batch, GlobalCount], tuple[Tensor, dict[str, Tensor]]]


def _constant(_update: int) -> float:
    return 1.0


@dataclass(frozen=True)
class OptimizerSettings:
    """`kind` and `arguments` name a class of torch.optim and its further arguments.

    `factor` gives the factor on the learning rate at an update, counted from 0. Without `decay_vectors`, weight decay
    leaves out weights of one dimension.
    """

    learning_rate: float
    weight_decay: float
    max_gradient_norm: float
    skip_non_finite: bool = False
    kind: Optimizer = OPTIMIZERS["adamw"]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    factor: Callable[[int], float] = _constant
    decay_vectors: bool = True


class TrainingEngine:
    """A network sharded over the ranks of the default process group.

    Trained weights and optimizer state keep the network's type; `execution` sets the type of activations and how they
    are computed. Each method loads what is offloaded and offloads it again; `stepping` keeps it loaded over several
    calls.
    """

    def __init__(self, network: nn.Module, execution: Execution, optimizer: OptimizerSettings | None = None) -> None:
        self.execution = execution
        self.device = execution.device
        self.world_size = dist.get_world_size()
        self.settings = optimizer
        if optimizer is None:
            network.requires_grad_(False).eval()
        mesh = device_mesh(execution)
        fill = take_weights(network, self.device)
        self.network = shard(network, execution, mesh)
        fill(self.network)
        # The ranks that split matrix products with this one, and those that compute other tokens of the same rows.
        self.peers = mesh[TENSOR].get_group() if TENSOR in mesh.mesh_dim_names else None
        self.network.context = context_group(execution)
        self.context_ranks = execution.sharding.context_parallel
        # All of them are this rank's data group.
        self.ranks_per_data_group = execution.sharding.ranks_per_data_group
        # FSDP averages gradients over ranks that hold the same part of split matrices.
        self.averaged_over = self.world_size // execution.sharding.tensor_parallel
        self._holds_whole_weights = (execution.sharding.shard_size or self.world_size) == 1
        # Found once: walking through all modules takes a millisecond.
        self._sharded_modules = sharded_modules(self.network)
        self.compiles = compiles(self.network, execution)
        self._has_adapters = any(adapted_layers(self.network))
        packed = Layout.SHARED if execution.share_prompts else Layout.PACKED
        self._layout = packed if is_packed(self.network.decoder) else Layout.PADDED
        # How the weights of the backend's layers map to Transformers' weights.
        self.origins = execution.backend.origins(self.network.decoder.config, execution.sharding.tensor_parallel)
        self.loss_scale = LossScale.of(execution.dtype)
        self.faults: FaultFiles | None = None
        offloads = execution.sharding
        self._weights = Offload(self.network.parameters if offloads.param_offload else list)
        if optimizer is None:
            return
        # The updates taken: steps of the role, each with one or more optimizer steps.
        self.updates = 0
        self.optimizer = self._new_optimizer(optimizer)
        self._states = Offload(partial(optimizer_states, self.optimizer) if offloads.optimizer_offload else list)

    def _new_optimizer(self, settings: OptimizerSettings) -> torch.optim.Optimizer:
        return getattr(torch.optim, settings.kind.torch)(
            parameter_groups(self.network, settings.decay_vectors),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            **settings.arguments,
            **({"fused": self.device.type == "cuda"} if settings.kind.fused else {}),
        )

    @contextmanager
    def updating(self) -> Iterator[float]:
        """One update: sets its learning rate, which it yields, and counts it after the block."""
        assert self.settings is not None
        rate = self.settings.learning_rate * self.settings.factor(self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        yield rate
        self.updates += 1

    @contextmanager
    def stepping(self, several: bool = True) -> Iterator[None]:
        """Keeps weights and optimizer state on the device while the block runs, then frees unused memory.

        With a single update (`several` is False), optimizer state stays offloaded until activations are freed.
        """
        with self._weights.needed(written=True), self._states.needed(written=True) if several else nullcontext():
            yield
        self.release_memory()

    @property
    def split_ranks(self) -> int | None:
        """How many ranks split the backend's layers, if a checkpoint can only be loaded with the same number.

        None if weights are stored as Transformers names them: any number of ranks can then load them.
        """
        return self.execution.sharding.tensor_parallel if self.origins else None

    def forward(self, batch: Batch, limit: MicroBatchLimit, routes: list[Routes] | None = None) -> Tensor:
        """Log-probs or values of all rows, [rows, response length] float32 on CPU.

        Every rank must call it, with the rows of its data group, which may be none. Appends the experts that their
        tokens chose to `routes`, if a list is given.
        """
        recorded: dict[int, Sequence[Segment]] = {}
        result = torch.zeros(batch.response_mask.shape, dtype=torch.float32, device=self.device)
        with torch.no_grad(), _memory_errors_explained(), self._weights.needed(written=False):
            parts, layout = micro_batches(batch, limit.of_ranks(self.context_ranks), self._layout)
            for rows in parts:
                part = rows_of(batch, rows)
                output = self.network(pack(part, self.device, layout, self.context_ranks))
                if routes is not None:
                    chosen = routes_of_rows(part, layout is Layout.SHARED, self._line_of_choices())
                    recorded |= dict(zip(rows.tolist(), chosen.segments, strict=False))  # none of a masked row
                values = output[0] if isinstance(output, tuple) else output
                # An index on the CPU would make the CPU wait for the GPU before the next micro-batch.
                result[to_device(rows, self.device)] = values[: len(rows)]
            gathered = result.cpu()
            reshard(self._sharded_modules)
        self.release_memory()
        if routes is not None:
            routes.append(Routes([recorded[row] for row in range(len(batch))]))
        return gathered

    def _line_of_choices(self) -> Choices:
        """The experts that the tokens of the last pass chose, of all ranks that computed them: [tokens, layers,
        choices]."""
        routers, context = self.network.routers, self.network.context
        chosen = routers.chosen()
        line = (chosen if context is None else context.whole_line(chosen)).cpu().numpy()
        return line.astype(smallest_type(routers.experts))

    def update(self, batch: Batch, loss_function: LossFunction, limit: MicroBatchLimit) -> dict[str, float]:
        """One optimizer step on the rows of a mini-batch that this rank's data group has, which may be none.

        Returns the loss function's metrics over the global mini-batch, `gradient_norm` before clipping, and `skipped`:
        1 if that norm is not finite, so that the optimizer step was left out. Raises WorkerError for such a norm unless
        `skip_non_finite` is set or, in float16, a smaller loss scale can help.
        """
        assert self.settings is not None
        with self._weights.needed(written=True):
            with _memory_errors_explained():
                metrics = self.accumulate_gradients(batch, loss_function, limit)
                norm = self.clip_gradients()
            finite = norm < float("inf")
            if not self.loss_scale.accepts(finite):
                self._report(norm, batch, limit)
            if finite:
                self._step()
            self.optimizer.zero_grad()
        if self.loss_scale.dynamic:
            metrics["loss_scale"] = self.loss_scale.value
        # A norm that is not finite would spoil the mean over steps; `skipped` reports it instead.
        return {**metrics, "gradient_norm": norm if finite else 0.0, "skipped": float(not finite)}

    def _report(self, norm: float, batch: Batch, limit: MicroBatchLimit) -> None:
        """Keeps the rows behind a non-finite norm, and raises WorkerError unless `skip_non_finite` is set."""
        assert self.settings is not None
        faults = ""
        if self.faults is not None:
            outputs, first = self.forward(batch, limit), dist.get_rank() % self.ranks_per_data_group == 0
            kept = slice(None) if first else slice(0)
            faults = f": {self.faults.keep(self.updates, self.network, batch.rows(kept), outputs[kept])}"
        if not self.settings.skip_non_finite:
            raise WorkerError(
                f"the gradient norm of {type(self.network).__name__} is {norm}{faults}",
                hint="lower the learning rate, or resume from an earlier checkpoint",
            )

    def _step(self) -> None:
        if not self.optimizer.state:
            # New states would otherwise land in cached activation memory, which could then not be freed.
            self.release_memory()
        # Smaller micro-batches leave no more memory to this step, which holds no activations.
        with _memory_errors_explained(WorkerError), self._states.needed(written=True):
            self.optimizer.step()
        if self.device.type == "cuda":
            # The caller frees the gradients next; torch could unmap their pages while kernels still read them.
            torch.cuda.synchronize()

    def accumulate_gradients(
        self, batch: Batch, loss_function: LossFunction, limit: MicroBatchLimit
    ) -> dict[str, float]:
        """Accumulates the gradient of the global mini-batch's loss, which does not depend on how rows are split.

        Returns the metrics, none if no token trains: means over these tokens, and what routers did.
        In float16 the gradient is multiplied by the loss scale.
        """
        mask = batch.response_mask
        of_ranks = reduced(torch.stack([mask.sum(), torch.tensor(batch.responses)]))
        count = GlobalCount(*(of_ranks // self.ranks_per_data_group).tolist())
        totals: dict[str, Tensor] = {}
        parts, layout = micro_batches(batch, limit.of_ranks(self.context_ranks), self._layout)
        # FSDP averages gradients, but the loss is already this data group's share of the global loss.
        factor = self.averaged_over * self.loss_scale.value
        routing = self.network.routers.updating(int(count.responses), factor)
        with self._weights.needed(written=False), routing as record:
            for number, rows in enumerate(parts, start=1):
                self._schedule_traffic(number, last=number == len(parts))
                part = rows_of(batch, rows)
                packed = pack(part, self.device, layout, self.context_ranks)
                loss, metrics = loss_function(self.network(packed), part.to(self.device), count)
                record.count_pass()
                (loss * factor).backward()
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + value.detach().double()
        if self.peers is not None:
            add_gradients_of_heads(self.network.decoder.layers, self.peers)
        # Read once at the end: reading a number waits for all of the GPU's work before it.
        sums = reduced(torch.stack(list(totals.values())).cpu()) / self.ranks_per_data_group
        means = dict(zip(totals, sums.tolist(), strict=True)) | record.metrics(reduced)
        return means if count.tokens else {}

    def _schedule_traffic(self, number: int, last: bool) -> None:
        """Sets what FSDP does after the backward pass of micro-batch `number`: reduce gradients, reshard weights.

        A single rank does neither before the last micro-batch, because it has nothing to gather.
        """
        sharding = self.execution.sharding

        def due(interval: int) -> bool:
            return last or (self.averaged_over > 1 and number % interval == 0)

        self.network.set_requires_gradient_sync(due(sharding.gradient_sync_interval))
        self.network.set_reshard_after_backward(due(sharding.resharding_interval))

    def release_memory(self) -> None:
        """Collects garbage and, on a shared GPU, returns torch's cached memory to the other processes."""
        collect_garbage()
        if self.execution.shares_gpu:
            give_back_memory()

    def discard_pass(self) -> None:
        """Drops the state of a pass that ran out of memory on a single rank, so that it can be repeated."""
        discard_pass(self.network)
        if self.settings is not None:
            self.optimizer.zero_grad()
        collect_garbage()
        give_back_memory()

    def lowered(self, batch: Batch, limit: MicroBatchLimit) -> MicroBatchLimit | None:
        """A limit that about halves the largest micro-batch of these rows; None if that is a single row."""
        if not len(batch):
            return None
        lengths, prompts = batch.lengths.tolist(), batch.shared_prompts()
        if self._layout is Layout.PADDED:
            lengths = [max(lengths)] * len(lengths)
        shares = self._layout is Layout.SHARED
        total = sum(map(prompts.cost, prompts.groups)) if shares else sum(lengths)
        lower = limit.of_ranks(self.context_ranks).lowered(lengths, total)
        each = lower and lower.of_each(self.context_ranks)
        return each if each and each.value < limit.value else None

    def clip_gradients(self) -> float:
        """Clips all gradients to the global L2 norm limit and returns the norm before clipping.

        Divides them by the loss scale.
        """
        assert self.settings is not None
        gradients = gradients_of(self.network.parameters())
        norm = global_norm(gradients) / self.loss_scale.value
        scale(gradients, min(1.0, self.settings.max_gradient_norm / (norm + 1e-6)) / self.loss_scale.value)
        return norm

    def full_weights(
        self, module: nn.Module, shared_once: bool = False, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The whole weights of a part of the network by Transformers' names, with adapters merged in.

        Every rank must exhaust it. A tied weight comes under both names, or under one with `shared_once`. A rank that
        holds whole weights yields the parameters themselves unless they are offloaded: copy what must survive the next
        update. Shards are converted to `dtype` before they are gathered, for half the traffic in 16 bits; if that is
        the type of the computation, a unit's are gathered at once.
        """
        reshard(self._sharded_modules)
        layers = adapted_layers(module) if self._has_adapters else ()
        adapted = {f"{name}.weight": layer for name, layer in layers}
        adapter_ids = {id(part) for layer in adapted.values() for part in (layer.lora_A, layer.lora_B)}
        convert = dtype is not None and not self._holds_whole_weights
        named = module.named_parameters(remove_duplicate=shared_once)
        if convert and dtype is self.execution.dtype and not adapted:
            named = gathered_by_unit(module, named, self._sharded_modules[1:])
        with self._weights.needed(written=False), torch.no_grad():
            for name, weight in named:
                if name in adapted:
                    yield name, adapted[name].merged(self._gather)
                elif id(weight) not in adapter_ids:
                    whole = self._gather(weight.to(dtype) if convert else weight)
                    yield from to_transformers(name, whole, self.origins)

    def buffers(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """The buffers that belong to a model's files, such as biases that choose experts; whole on every rank."""
        stored = module.state_dict().keys()
        return [(name, buffer) for name, buffer in module.named_buffers() if name in stored]

    def adapter_weights(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """Copies of the whole adapters of a part of the network, by peft's names. Every rank must call it."""
        reshard(self._sharded_modules)
        with self._weights.needed(written=False):
            return [(name, tensor.clone()) for name, tensor in adapter_weights(module, self._gather)]

    def _gather(self, weight: Tensor) -> Tensor:
        if not isinstance(weight, DTensor):
            return weight
        if not self._holds_whole_weights:
            return weight.full_tensor()
        return weight.to_local().clone() if self.execution.sharding.param_offload else weight.to_local()


def parameter_groups(network: nn.Module, decay_vectors: bool = True) -> list[dict[str, Any]]:
    """The trained weights of a sharded network, as torch's optimizers take them.

    Those of one mesh are a group, because not every release of torch can mix meshes in a fused kernel. Without
    `decay_vectors`, biases and weights of one dimension are others, without weight decay.
    """
    groups: dict[tuple[DeviceMesh, bool], list[nn.Parameter]] = defaultdict(list)
    for name, weight in network.named_parameters():
        if weight.requires_grad:
            # Experts' biases have two dimensions, because those of all experts are one weight.
            decays = decay_vectors or (weight.ndim > 1 and not name.endswith("bias"))
            groups[weight.device_mesh, decays].append(weight)
    return [{"params": weights, **({} if decays else {"weight_decay": 0.0})} for (_, decays), weights in groups.items()]


def optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every tensor of an optimizer's state."""
    for states in optimizer.state.values():
        yield from (state for state in states.values() if isinstance(state, Tensor))


@contextmanager
def _memory_errors_explained(kind: type[WorkerError] = MemoryFullError) -> Iterator[None]:
    """Turns torch's OutOfMemoryError into an error that names the settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise kind(
            f"the GPU's memory is full: {str(error).split('. Of the allocated')[0]}",
            hint="lower micro_batch_tokens (or micro_batch_size), or set sharding.optimizer_offload=true or "
            "activation_checkpointing=true, of the actor or the critic; see docs/guides/tuning.md",
        ) from error


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[DTensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def global_norm(gradients: Iterable[DTensor]) -> float:
    """The L2 norm of all gradients over all ranks, on any number of meshes. Every rank must call it."""
    by_mesh: dict[object, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh].append(gradient)
    norms = [nn.utils.get_total_norm(gradients_of_mesh).full_tensor() for gradients_of_mesh in by_mesh.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


@torch.no_grad()
def scale(gradients: Iterable[DTensor], factor: float) -> None:
    """Multiplies all gradients by a factor in place."""
    if local := [gradient.to_local() for gradient in gradients]:
        torch._foreach_mul_(local, factor)
