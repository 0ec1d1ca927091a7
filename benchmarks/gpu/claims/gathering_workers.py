"""Workers that also hand over weights as a state dict gathered whole."""

from typing import Any

import numpy as np
import ray
import torch
from ray import ObjectRef
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from benchmarks.gpu.common import synchronize
from trainer.roles.actor import ActorWorker
from trainer.roles.rollout import RolloutWorker


class GatheringActor(ActorWorker):
    def gather_everything(self) -> tuple[list[ObjectRef], int]:
        """The whole model in the object store, in the engines' type, and the bytes gathered for it. Every rank calls
        it; only the first returns weights."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.engine.network.language_model, options=options)
        if self.place.rank > 0:
            return [], 0
        gathered = sum(weight.nbytes for weight in state.values())
        handed = {name: as_bytes(weight.to(self.dtype)) for name, weight in state.items()}
        return [ray.put((handed, self.dtype))], gathered


class LoadingRollout(RolloutWorker):
    def load_everything(self, stored: list[ObjectRef]) -> int:
        """Loads that model; the bytes received."""
        handed, dtype = ray.get(stored[0])
        weights = [(name, as_tensor(data, shape, dtype)) for name, (data, shape) in handed.items()]
        engine: Any = self._engine
        engine._engine.collective_rpc(load_weights, args=(weights,))
        synchronize()
        return sum(weight.nbytes for _, weight in weights)


def load_weights(worker: Any, weights: list[tuple[str, Tensor]]) -> None:
    """In vLLM's worker: loads weights by Transformers' names.

    vLLM's build for CPUs has changed the layout of its weights, which only a reload undoes.
    """
    if worker.device.type == "cpu":
        worker.model_runner.reload_weights(weights_iterator=iter(weights))
        return
    worker.model_runner.get_model().load_weights((name, weight.to(worker.device)) for name, weight in weights)


def as_bytes(weight: Tensor) -> tuple[np.ndarray, tuple[int, ...]]:
    """A weight as an array, which Ray shares without pickling, and its shape. numpy has no bfloat16."""
    return weight.contiguous().view(torch.uint8).numpy(), tuple(weight.shape)


def as_tensor(data: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The weight again. A copy: shared memory is read-only, which tensors do not support."""
    return torch.from_numpy(data.copy()).view(dtype).view(shape)
