"""The base class of the three training roles."""

import platform
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from trainer.algorithms.optimization.optimizers import OPTIMIZERS
from trainer.algorithms.registry import POLICY_LOSSES
from trainer.cluster.keepers import KeeperLink
from trainer.cluster.place import RankPlace
from trainer.config.sections.roles import ActorConfig, CriticConfig, TrainedModelConfig
from trainer.config.tree import WorkersConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.errors import DataError, LoweredLimit, MemoryFullError
from trainer.models.backend import training_backend
from trainer.models.lora import add_adapters, load_adapter
from trainer.models.networks import computation_notes
from trainer.models.pretrained import empty_language_model, load_language_model, why_not_in_files
from trainer.records.profiling import Tracer
from trainer.training.compile_ahead import compile_ahead, large_pass, typical_rows
from trainer.training.determinism import compute_deterministically
from trainer.training.engine import LossFunction, OptimizerSettings, TrainingEngine
from trainer.training.memory.allocator import use_expandable_segments
from trainer.training.micro_batches import LENGTH_MULTIPLE
from trainer.training.non_finite import FOLDER, FaultFiles
from trainer.training.ranks.process_group import connect_store, join, open_store
from trainer.training.ranks.sharded_state import ShardedState
from trainer.training.ranks.sharding import Execution

R = TypeVar("R")

# A section of the settings with limits of micro-batches. Reference and teacher compute with those of the actor.
LimitedBy = Literal["actor", "critic"]

MOST_RETRIES = 4  # of a rank that lacked memory; each about halves its largest micro-batch


class TrainingWorker:
    """One rank of a training role. Call `open_store` on rank 0 first, then `setup` on all ranks."""

    engine: TrainingEngine
    run_steps: int
    section: LimitedBy = "actor"
    needs_head = True  # the model's own output head
    _sharded_state: ShardedState | None = None

    def __init__(self, config: WorkersConfig, place: RankPlace) -> None:
        self.config = config
        self.place = place
        self.device = torch.device(place.device)
        self.dtype = getattr(torch, config.model.dtype_on(place.device))
        self._store: TCPStore | None = None
        self._tracer = Tracer()
        self._limit = micro_batch_limit(self._settings)  # at most the settings' own
        self._untold: list[LoweredLimit] = []  # what the controller does not know of yet
        self._retries = 0
        self._notes: list[str] = []

    def open_store(self) -> int:
        """Rank 0 only: opens the store at which the ranks meet; its port."""
        self._store = open_store(self.place.address, self.place.world_size, self.config.trainer.worker_timeout)
        return int(self._store.port)

    def setup(self, store_address: str, store_port: int, run_dir: Path, run_steps: int) -> list[str]:
        """Joins the process group and builds this rank's shard of the network, for a run with `run_steps` steps.

        Returns what the user should know of how it computes.
        """
        self.run_steps = run_steps
        if not run_dir.is_dir():
            raise DataError(
                f"{run_dir} is not visible at {self.place.address}",
                hint="point trainer.output_dir and model.path at a file system that all nodes share",
            )
        use_expandable_segments(self.device)
        if self.config.trainer.deterministic:
            compute_deterministically()
        timeout, world_size = self.config.trainer.worker_timeout, self.place.world_size
        store = self._store or connect_store(store_address, store_port, world_size, timeout)
        join(store, self.place.rank, world_size, self.device, self.place.address, timeout)
        self.engine = self.build()
        if self.engine.settings is not None:
            self._sharded_state = ShardedState(self.engine)
            role = type(self).__name__.removesuffix("Worker").lower()
            self.engine.faults = FaultFiles(run_dir / FOLDER, role, self.config.model.directory)
        if self.engine.compiles or self.config.is_exact:  # exact layers compile their kernels and gradients
            compile_ahead(self.engine, self._typical_rows())
        return [*self._notes, *computation_notes(self.engine.network.decoder)]

    def _typical_rows(self) -> Batch:
        """Rows that compile what those of a large micro-batch will need."""
        (prompt, response), model = self.config.longest_row, self.engine.network.decoder.config
        ranks = self._settings.sharding.context_parallel
        limit = micro_batch_limit(self._settings).of_ranks(ranks)
        most = limit.tokens or limit.rows * (prompt + response)
        return typical_rows(
            model.vocab_size,
            prompt,
            response,
            min(most, large_pass(model.hidden_size) * ranks),
            share_prompt=self.config.responses_per_prompt > 1,
            multiple=LENGTH_MULTIPLE * ranks,
        )

    @property
    def _settings(self) -> ActorConfig | CriticConfig:
        settings: ActorConfig | CriticConfig = getattr(self.config, self.section)
        return settings

    def device_kind(self) -> str:
        """The kind of this rank's device."""
        return device_kind(self.device)

    def build(self) -> TrainingEngine:
        raise NotImplementedError

    def language_model(self, path: Path, settings: TrainedModelConfig) -> nn.Module:
        """The model at `path` to train, with LoRA adapters if the settings ask for them."""
        weights = getattr(torch, settings.weights_dtype)
        if not settings.lora.rank:
            return self.read_model(path, weights, settings)
        # Frozen weights need only the compute precision.
        language_model = self.read_model(path, self.dtype, settings)
        add_adapters(language_model, settings.lora, self.config.trainer.seed, weights)
        if settings.lora.path is not None:
            load_adapter(language_model, settings.lora)
        return language_model

    def read_model(self, path: Path, dtype: torch.dtype, settings: TrainedModelConfig) -> nn.Module:
        """The model at `path`, with parameters that stay in their files until the engine reads this rank's slices.

        A layer must have its weights before it is split or replaced. Weights that Transformers computes from those in
        the files are read by the first rank, which broadcasts them; see trainer/training/ranks/loading.py.
        """
        if settings.sharding.tensor_parallel > 1 or training_backend(settings.backend).needs_weights:
            return load_language_model(path, dtype, self.needs_head)
        reason = why_not_in_files(path)
        if reason is None:
            return load_language_model(path, dtype, self.needs_head, in_files=True)
        self._notes.append(f"{path}: the first rank loads the whole model and broadcasts it, because {reason}")
        return (
            load_language_model(path, dtype, self.needs_head)
            if self.place.rank == 0
            else empty_language_model(path, dtype)
        )

    def execution(self, settings: TrainedModelConfig) -> Execution:
        """Device, precision and sharding of a network on this rank."""
        on_gpu = self.device.type == "cuda"
        return Execution(
            self.device,
            self.dtype,
            checkpoint_activations=settings.activation_checkpointing,
            compile_layers=settings.compile and on_gpu,
            activation_memory_budget=settings.activation_memory_budget,
            shares_gpu=self.config.rollout.sleep and on_gpu,
            share_prompts=settings.share_prompts,
            float32_routers=settings.router_dtype == "float32",
            backend=training_backend(settings.backend),
            sharding=settings.sharding if on_gpu else settings.sharding.without_offload(),
        )

    def optimizer(self, settings: ActorConfig | CriticConfig) -> OptimizerSettings:
        """The settings of this rank's optimizer."""
        skip = self.config.watchdogs.non_finite_gradients == "skip"
        return OptimizerSettings(
            settings.learning_rate,
            settings.weight_decay,
            settings.max_gradient_norm,
            skip,
            OPTIMIZERS[settings.optimizer.name],
            settings.optimizer.arguments,
            partial(settings.schedule.factor, run_steps=self.run_steps),
            settings.optimizer.decay_biases_and_norms,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Log-probs or values of the responses of this rank's data group, [rows, response length]."""
        return self.in_micro_batches(batch, partial(self.engine.forward, batch))

    def in_micro_batches(self, batch: Batch, compute: Callable[[MicroBatchLimit], R]) -> R:
        """What `compute` returns under the limit of this role.

        If the memory is full, a single rank computes again under a lower limit, which it keeps. Several ranks cannot,
        because the others wait for this one: raises MemoryFullError with a lower limit, if one may help and does not
        change the result.
        """
        while True:
            try:
                return compute(self._limit)
            except MemoryFullError as error:
                lower = self._lowered(batch)
                if lower is None or self._retries == MOST_RETRIES:
                    raise
                change = LoweredLimit(f"{self.section}.{lower.setting}", self._limit.value, lower.value)
                if self.place.world_size > 1:
                    raise MemoryFullError(str(error), error.hint, change) from error
            # Not before: the error's traceback holds the tensors of the pass.
            self.engine.discard_pass()
            self._limit = lower
            self._retries += 1
            self._untold.append(change)

    def _lowered(self, batch: Batch) -> MicroBatchLimit | None:
        """A lower limit with the same result; None if there is none."""
        if self.section == "actor" and POLICY_LOSSES[self.config.actor.policy_loss].per_micro_batch:
            return None
        return self.engine.lowered(batch, self._limit)

    def lower(self, lowered: LoweredLimit) -> None:
        """Computes under a lower limit from now on, if it is one of this role's."""
        if lowered.setting.startswith(f"{self.section}."):
            self._limit = micro_batch_limit(self._settings).with_value(lowered.after)

    def take_lowered(self) -> list[LoweredLimit]:
        """The limits that this rank has lowered since the last call."""
        lowered, self._untold = self._untold, []
        return lowered

    def take_steps(self, batch: Batch, mini_batches: Sequence[int], loss_function: LossFunction) -> dict[str, float]:
        """Takes all optimizer steps of a PPO step; mean metrics, named `role/metric`.

        `batch` are the rows of this rank's data group, and `mini_batches` how many of them each mini-batch has.
        They are equal on every rank, except `gpu_peak_gib`, this rank's peak GPU memory. Means over tokens leave out
        mini-batches in which no token trains, and are absent if there is no other.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        settings = self._settings
        several = settings.ppo_epochs * len(mini_batches) > 1
        with self.engine.updating() as rate, self.engine.stepping(several):
            steps = [
                self.in_micro_batches(mini_batch, partial(self.engine.update, mini_batch, loss_function))
                for epoch in range(settings.ppo_epochs)
                for mini_batch in (self.shuffled(batch, epoch) if settings.shuffle else batch).split(mini_batches)
            ]
        values_of = {name: [step[name] for step in steps if name in step] for name in dict.fromkeys(chain(*steps))}
        means = {name: sum(values) / len(values) for name, values in values_of.items()} | {"learning_rate": rate}
        if self.device.type == "cuda":
            means["gpu_peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
        return {f"{self.section}/{name}": mean for name, mean in means.items()}

    def shuffled(self, batch: Batch, epoch: int) -> Batch:
        """The rows in the random order of an epoch, which follows from seed, update, epoch and data group."""
        order, group = list(range(len(batch))), self.place.rank // self._settings.sharding.ranks_per_data_group
        random.Random(f"{self.config.trainer.seed} {self.engine.updates} {epoch} {group}").shuffle(order)
        return batch.rows(torch.tensor(order, dtype=torch.int64))

    def start_trace(self) -> None:
        """Starts a trace of this rank."""
        self._tracer.start()

    def stop_trace(self, directory: Path, step: int, role: str) -> None:
        """Ends the trace and writes it."""
        self._tracer.stop(directory / f"step_{step:06d}-{role}-rank{self.place.rank}.json")

    def start_save(self, directory: Path) -> None:
        """Starts to write this rank's part of the role's state while training continues."""
        self._state().start_save(directory)

    def saving(self) -> bool:
        """Whether this rank's part is still being written."""
        return self._state().saving()

    def finish_save(self, seconds: float) -> dict[str, str] | None:
        """The SHA-256 of this rank's files; None if it still writes after this time. Raises CheckpointError."""
        return self._state().finish_save(seconds)

    def load(self, directory: Path) -> None:
        """Loads a state that was saved."""
        self._state().load(directory)

    def keep(self, step: int, keeper: KeeperLink) -> None:
        """Sends this rank's part of the role's state to its keeper."""
        self._state().keep(step, keeper)

    def restore(self, step: int, keepers: Sequence[KeeperLink]) -> None:
        """Loads the state that the keepers of all ranks have."""
        self._state().restore(step, keepers)

    def _state(self) -> ShardedState:
        assert self._sharded_state is not None, "this role takes no optimizer steps"
        return self._sharded_state


def micro_batch_limit(settings: TrainedModelConfig) -> MicroBatchLimit:
    """How much one forward pass of this role may hold."""
    return MicroBatchLimit(settings.micro_batch_size, settings.micro_batch_tokens)


def device_kind(device: torch.device) -> str:
    """The device's name. On CPU also the instruction set and the number of threads, which decide how sums are split."""
    if device.type != "cpu":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name of this machine's processor, or its architecture where Linux tells no name."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
