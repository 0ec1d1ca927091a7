"""The base class of the three training roles."""

import random
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore

from trainer.algorithms.optimization.optimizers import OPTIMIZERS
from trainer.cluster.place import RankPlace
from trainer.config.roles import ActorConfig, CriticConfig, TrainedModelConfig
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.errors import DataError
from trainer.models.backend import training_backend
from trainer.models.lora import add_adapters, load_adapter
from trainer.models.networks import computation_notes, empty_language_model, load_language_model
from trainer.records.profiling import Tracer
from trainer.training.allocator import use_expandable_segments
from trainer.training.device import device_kind
from trainer.training.engine import LossFunction, OptimizerSettings, TrainingEngine
from trainer.training.non_finite import FOLDER, FaultFiles
from trainer.training.process_group import connect_store, join, open_store
from trainer.training.sharded_state import ShardedState
from trainer.training.sharding import Execution


class TrainingWorker:
    """One rank of a training role. Call `open_store` on rank 0 first, then `setup` on all ranks."""

    engine: TrainingEngine
    run_steps: int
    _sharded_state: ShardedState | None = None

    def __init__(self, config: Config, place: RankPlace) -> None:
        self.config = config
        self.place = place
        self.device = torch.device(place.device)
        self.dtype = getattr(torch, config.model.dtype_on(place.device))
        self._store: TCPStore | None = None
        self._tracer = Tracer()

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
        timeout, world_size = self.config.trainer.worker_timeout, self.place.world_size
        store = self._store or connect_store(store_address, store_port, world_size, timeout)
        join(store, self.place.rank, world_size, self.device, self.place.address, timeout)
        self.engine = self.build()
        if self.engine.settings is not None:
            self._sharded_state = ShardedState(self.engine)
            role = type(self).__name__.removesuffix("Worker").lower()
            self.engine.faults = FaultFiles(run_dir / FOLDER, role, self.config.model.directory)
        return computation_notes(self.engine.network.decoder)

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
        """The model at `path`. Its weights are missing if the first rank broadcasts them; see
        trainer/training/first_rank.py. A layer must have its weights before it is split or replaced."""
        needs_weights = settings.sharding.tensor_parallel > 1 or training_backend(settings.backend).needs_weights
        return (load_language_model if needs_weights or self.place.rank == 0 else empty_language_model)(path, dtype)

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
        )

    def take_steps(
        self, role: str, settings: ActorConfig | CriticConfig, batch: Batch, loss_function: LossFunction
    ) -> dict[str, float]:
        """Takes all optimizer steps of a PPO step on this rank's rows; mean metrics, named `role/metric`.

        They are equal on every rank, except `gpu_peak_gib`, this rank's peak GPU memory.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        rows = settings.mini_batch_size // self.place.world_size
        several = settings.ppo_epochs > 1 or len(batch) > rows
        with self.engine.updating() as rate, self.engine.stepping(several):
            steps = [
                self.engine.update(mini_batch, loss_function, micro_batch_limit(settings))
                for epoch in range(settings.ppo_epochs)
                for mini_batch in (self.shuffled(batch, epoch) if settings.shuffle else batch).micro_batches(rows)
            ]
        means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]} | {"learning_rate": rate}
        if self.device.type == "cuda":
            means["gpu_peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
        return {f"{role}/{name}": mean for name, mean in means.items()}

    def shuffled(self, batch: Batch, epoch: int) -> Batch:
        """This rank's rows in the random order of an epoch, which follows from seed, update, epoch and rank."""
        order = list(range(len(batch)))
        random.Random(f"{self.config.trainer.seed} {self.engine.updates} {epoch} {self.place.rank}").shuffle(order)
        return batch.rows(torch.tensor(order))

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

    def _state(self) -> ShardedState:
        assert self._sharded_state is not None, "this role takes no optimizer steps"
        return self._sharded_state


def micro_batch_limit(settings: TrainedModelConfig) -> MicroBatchLimit:
    """How much one forward pass of this role may hold."""
    return MicroBatchLimit(settings.micro_batch_size, settings.micro_batch_tokens)
