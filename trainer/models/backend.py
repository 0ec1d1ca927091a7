"""What a training backend provides: the transformer layers that compute. FSDP2 shards the weights of either."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.models.megatron_weights import Origins
from trainer.models.networks import PolicyNetwork, ValueNetwork

Network = PolicyNetwork | ValueNetwork


class TrainingBackend(Protocol):
    """One value of `actor.backend` and `critic.backend`."""

    compiles_layers: bool
    """Whether `torch.compile` may compile its layers."""

    takes_adapters: bool
    """Whether LoRA adapters work on its layers."""

    needs_weights: bool
    """Whether every rank must read the whole weights before `prepare`."""

    def check(self, role: str, model: Mapping[str, Any]) -> None:
        """Raises ConfigError if this machine or a model with this `config.json` cannot use the backend."""
        ...

    def prepare(self, network: Network, device: torch.device, mesh: DeviceMesh | None) -> None:
        """Makes the layers of a network ready for training, in place, before FSDP2 shards them.

        With a mesh, its ranks split the matrix products. Raises ConfigError if device or layers do not fit.
        """
        ...

    def origins(self, config: Any, ranks: int) -> Origins:
        """How weights of these layers map to Transformers' weights; empty if the layers are Transformers' own.

        `ranks` split the matrix products.
        """
        ...


def training_backend(name: str) -> TrainingBackend:
    """The backend of that name: one module each in `trainer/models/backends`."""
    backend: TrainingBackend = import_module(f"trainer.models.backends.{name}").BACKEND
    return backend
