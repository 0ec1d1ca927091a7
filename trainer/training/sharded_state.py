"""A network and its optimizer on disk: each rank writes its shards while training goes on; any number of ranks reads
them.
"""

from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from trainer.errors import CheckpointError
from trainer.training.engine import TrainingEngine

_SPLIT = "tensor_parallel"  # what a checkpoint calls the number of ranks that have split Megatron's layers


class ShardedState:
    """What a checkpoint holds of one trained network. Every rank of the default process group calls every method.

    `timeout` bounds each collective of a save, in seconds.
    """

    def __init__(self, engine: TrainingEngine, timeout: float) -> None:
        self._engine = engine
        self._network = engine.network
        self._optimizer = engine.optimizer
        # A group of its own: the collectives of a save must not mix with those of the training beside it.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._write: Future[Any] | None = None
        self._directory = Path()

    def start_save(self, directory: Path) -> None:
        """Copies the state to CPU memory and returns; a thread writes the copy. `finish_save` tells how it went."""
        self.finish_save()
        self._directory = directory
        with self._engine.stepping():
            write = distributed_checkpoint.async_save(
                self._state(), checkpoint_id=str(directory), process_group=self._group
            )
        assert isinstance(write, Future)  # an AsyncSaveResponse comes from stagers that copy in the background only
        self._write = write

    def saving(self) -> bool:
        """Whether a save is still being written."""
        return self._write is not None and not self._write.done()

    def finish_save(self) -> None:
        """Waits until the save is written. Raises CheckpointError, on every rank, if any of them could not write."""
        if self._write is None:
            return
        write, self._write = self._write, None
        try:
            write.result()
        except (distributed_checkpoint.CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._directory}: cannot be written: {_cause(error)}",
                hint="check free space and permissions of that directory",
            ) from error

    def load(self, directory: Path) -> None:
        """Continues from what was saved, under any number of ranks, with the optimizer's settings as they are now.

        Raises CheckpointError if it is damaged or of a network of another shape.
        """
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        with self._engine.stepping():
            state = self._state()
            try:
                self._check_names(directory, state["network"])
                distributed_checkpoint.load(state, checkpoint_id=str(directory))
            except (distributed_checkpoint.CheckpointException, OSError, RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"{directory}: cannot be loaded: {_cause(error)}",
                    hint="resume from another checkpoint of the run, with the models that it started from",
                ) from error
            set_state_dict(
                self._network,
                self._optimizer,
                model_state_dict=state["network"],
                optim_state_dict=state["optimizer"],
                options=StateDictOptions(strict=False),
            )
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)
        if self._engine.loss_scale.dynamic:
            self._engine.loss_scale.restore(state["loss_scale"])

    def _check_names(self, directory: Path, network: dict[str, Any]) -> None:
        """Raises ValueError for a checkpoint with more than this network: torch would load a part of it in silence.

        Megatron's layers join weights share by share, so they are those of as many ranks as have split them.
        """
        saved = distributed_checkpoint.FileSystemReader(str(directory)).read_metadata().state_dict_metadata
        if (_SPLIT in saved) != bool(self._engine.origins):
            raise ValueError(f"it was saved with backend={'megatron' if _SPLIT in saved else 'fsdp'}: set that again")
        if _SPLIT in saved:
            split = {_SPLIT: torch.zeros((), dtype=torch.int64)}
            distributed_checkpoint.load(split, checkpoint_id=str(directory))
            if int(split[_SPLIT]) != self._engine.execution.sharding.tensor_parallel:
                raise ValueError(
                    f"it was saved with backend=megatron and tensor_parallel={int(split[_SPLIT])}: set that again"
                )
        more = sorted({name for name in saved if name.startswith("network.")} - {f"network.{name}" for name in network})
        if more:
            raise ValueError(f"it is of a larger network, with {more[0].removeprefix('network.')}")

    def _state(self) -> dict[str, Any]:
        network, optimizer = get_state_dict(self._network, self._optimizer)
        for name, weight in self._network.named_parameters(remove_duplicate=False):
            if not weight.requires_grad:  # as in the model that the run started from
                del network[name]
        state = {"network": network, "optimizer": optimizer}
        if self._engine.origins:
            state[_SPLIT] = torch.tensor(self._engine.execution.sharding.tensor_parallel)
        scale = self._engine.loss_scale
        return {**state, "loss_scale": scale.state()} if scale.dynamic else state


def _cause(error: BaseException) -> str:
    """What went wrong on the first rank that failed; torch's own text has the traceback of each of them."""
    failures = getattr(error, "failures", None)
    if not failures:
        return str(error)
    rank, failure = next(iter(failures.items()))
    cause = failure[0] if isinstance(failure, tuple) else failure
    return f"rank {rank}: {cause}"
