"""Checkpoints of a network and its optimizer. Each rank writes its shards while training continues; any number of ranks
can load them."""

import pickle
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from trainer.cluster.keepers import KeeperLink
from trainer.errors import CheckpointError
from trainer.records.files.checksums import sha256
from trainer.records.files.disk import refusal, unwritable
from trainer.training.loss_scale import LossScale
from trainer.training.ranks.copies import CopyReader, write_copy
from trainer.training.ranks.reading import METADATA_FILE, SafeReader, load_safely, read_metadata

SLOWEST_WRITE = timedelta(days=1)
# Key in the checkpoint: how many ranks split the layers, where that number must not change.
_SPLIT = "tensor_parallel"
# Key in the checkpoint: how many updates were taken, which decides the learning rate.
_UPDATES = "updates"
# Key in the checkpoint: whether the optimizer has taken a step; if not, it has no states yet.
_STARTED = "optimizer_started"


class TrainedNetwork(Protocol):
    """The interface that a checkpoint saves and restores; `TrainingEngine` implements it."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    updates: int

    @property
    def split_ranks(self) -> int | None:
        """How many ranks split the layers, if the checkpoint can only be loaded with the same number; else None."""
        ...

    def stepping(self) -> AbstractContextManager[None]:
        """Keeps weights and optimizer state on the device while the block runs."""
        ...


class ShardedState:
    """The checkpoint of one trained network. Every rank of the default process group must call every method."""

    def __init__(self, trained: TrainedNetwork) -> None:
        self._trained = trained
        # A separate group: the collectives of a save must not mix with those of the training that runs beside it. Their
        # limit only ends a write that nobody waits for any more: ranks wait here for the one with the slowest disk.
        self._group = dist.new_group(backend="gloo", timeout=SLOWEST_WRITE)
        self._thread = ThreadPoolExecutor(1, "checksums")
        self._write: Future[dict[str, str]] | None = None
        self._directory = Path()
        self._size = 0

    def start_save(self, directory: Path) -> None:
        """Copies the state to CPU memory and returns. A thread writes the copy; `finish_save` reports its errors."""
        self._directory = directory
        try:
            with self._trained.stepping():
                state, _ = self._state()
                self._size = _bytes_of(state) * dist.get_world_size(self._group)
                write = distributed_checkpoint.async_save(
                    state, checkpoint_id=str(directory), process_group=self._group
                )
        except (OSError, MemoryError, RuntimeError) as error:
            raise CheckpointError(
                f"{directory}: the state cannot be copied to the node's memory: {error}",
                hint="free memory of the node: a copy takes 12 bytes per weight, shared among the ranks",
            ) from error
        assert isinstance(write, Future)  # only stagers that copy in the background return an AsyncSaveResponse
        self._write = self._thread.submit(self._written, write, directory)

    def saving(self) -> bool:
        """Whether a save is still being written."""
        return self._write is not None and not self._write.done()

    def finish_save(self, seconds: float) -> dict[str, str] | None:
        """The SHA-256 of each file that this rank wrote; None if it still writes after this many seconds.

        Raises CheckpointError on every rank if any rank could not write.
        """
        if self._write is None:
            return {}
        if not wait([self._write], seconds).done:
            return None
        try:
            return self._write.result()
        except (distributed_checkpoint.CheckpointException, OSError, RuntimeError) as error:
            raise unwritable(self._directory, refusal(self._directory, self._size) or _cause(error)) from error

    def _written(self, write: Future[Any], directory: Path) -> dict[str, str]:
        write.result()
        rank = dist.get_rank(self._group)
        files = [*directory.glob(f"__{rank}_*"), *([directory / METADATA_FILE] if rank == 0 else [])]
        return {file.name: sha256(file) for file in files}

    def keep(self, step: int, keeper: KeeperLink) -> None:
        """Sends a copy of this rank's part of the state to its keeper, and returns when that has it."""
        with self._trained.stepping():
            state, _ = self._state()
            write_copy(state, step, keeper)

    def restore(self, step: int, keepers: Sequence[KeeperLink]) -> None:
        """Restores the state that `keep` has sent; `keepers` are those of all ranks.

        Raises CheckpointError if a part of it is missing.
        """
        self._load(CopyReader(step, keepers), f"the copies of step {step}")

    def load(self, directory: Path) -> None:
        """Restores a saved state on any number of ranks. The optimizer keeps its current settings.

        Raises CheckpointError if the checkpoint is damaged or its network has another shape.
        """
        self._load(directory, str(directory))

    def _load(self, source: Path | SafeReader, name: str) -> None:
        optimizer = self._trained.optimizer
        with self._trained.stepping():
            state, groups = self._state()
            try:
                self._fit(state, source)
                load_safely(state, source)
            except (
                *(distributed_checkpoint.CheckpointException, pickle.UnpicklingError),
                *(OSError, RuntimeError, ValueError, KeyError),
            ) as error:
                raise CheckpointError(
                    f"{name}: cannot be loaded: {_cause(error)}",
                    hint="resume from another checkpoint of this run, and start from the same models as the run did",
                ) from error
            set_state_dict(
                self._trained.network,
                optimizer,
                model_state_dict=state["network"],
                optim_state_dict={"state": state["optimizer"]["state"], "param_groups": groups},
                options=StateDictOptions(strict=False),
            )
        if self._trained.loss_scale.dynamic:
            self._trained.loss_scale.restore(state["loss_scale"])
        self._trained.updates = int(state.get(_UPDATES, 0))
        if not state.get(_STARTED, True):
            optimizer.state.clear()  # see `_state`

    def _fit(self, state: dict[str, Any], source: Path | SafeReader) -> None:
        """Removes what a checkpoint of an earlier version lacks.

        Raises ValueError if the checkpoint holds more than this state: torch would silently load a part of it.

        Layers that join several weights in one join them rank by rank, so their checkpoint fits one split only.
        """
        saved = read_metadata(source).state_dict_metadata
        split_ranks = self._trained.split_ranks
        if (_SPLIT in saved) != (split_ranks is not None):
            raise ValueError("it was saved with another training backend: set `backend` as in that run")
        if _SPLIT in saved:
            split = {_SPLIT: torch.zeros((), dtype=torch.int64)}
            load_safely(split, source)
            if int(split[_SPLIT]) != split_ranks:
                raise ValueError(f"it was saved with sharding.tensor_parallel={int(split[_SPLIT])}: set that again")
        names = {f"network.{name}" for name in state["network"]}
        if more := sorted({name for name in saved if name.startswith("network.")} - names):
            raise ValueError(f"its network is larger: it has {more[0].removeprefix('network.')}")
        kept = {name for values in state["optimizer"]["state"].values() for name in values}
        saved_fields = {name.rpartition(".")[2] for name in saved if name.startswith("optimizer.state.")}
        if more := sorted(saved_fields - kept):
            raise ValueError(f"it was saved with another optimizer, which keeps {more[0]}: set that again")
        for name in {_UPDATES, _STARTED} - saved.keys():
            del state[name]

    def _state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What a checkpoint holds, and the optimizer's groups of weights with their settings, which none holds: they
        follow from the run's settings and from how weights are sharded."""
        started = bool(self._trained.optimizer.state)
        network, optimizer = get_state_dict(self._trained.network, self._trained.optimizer)
        if not started:  # torch has taken a step with gradients of zero, which Adam would count as its first
            self._trained.optimizer.state.clear()
        for name, weight in self._trained.network.named_parameters(remove_duplicate=False):
            if not weight.requires_grad:  # the run's starting model has it
                del network[name]
        counts = {_UPDATES: torch.tensor(self._trained.updates), _STARTED: torch.tensor(started)}
        state = {"network": network, "optimizer": {"state": optimizer["state"]}, **counts}
        if self._trained.split_ranks is not None:
            state[_SPLIT] = torch.tensor(self._trained.split_ranks)
        scale = self._trained.loss_scale
        return {**state, "loss_scale": scale.state()} if scale.dynamic else state, optimizer["param_groups"]


def _bytes_of(state: Any) -> int:
    """The size of the tensors in a state that this rank holds."""
    if isinstance(state, Tensor):
        local = state.to_local() if isinstance(state, DTensor) else state
        return int(local.nbytes)
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(_bytes_of, inner))


def _cause(error: BaseException) -> str:
    """The error of the first rank that failed; torch's own text repeats every rank's traceback."""
    failures = getattr(error, "failures", None)
    if not failures:
        return str(error)
    rank, failure = next(iter(failures.items()))
    cause = failure[0] if isinstance(failure, tuple) else failure
    return f"rank {rank}: {cause}"
