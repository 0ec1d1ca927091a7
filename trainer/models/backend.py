"""What a training backend provides: the transformer layers that compute. FSDP2 shards the weights of either."""

from importlib import import_module
from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.models.megatron_weights import Origins


class TrainingBackend(Protocol):
    """One value of `actor.backend` and `critic.backend`."""

    compiles_layers: bool
    """Whether `torch.compile` may compile its layers."""

    takes_adapters: bool
    """Whether LoRA adapters work on its layers."""

    needs_weights: bool
    """Whether every rank must read the weights before `prepare_layers`; otherwise the first rank broadcasts them."""

    def check(self, role: str, family: str | None) -> None:
        """Raises ConfigError if this machine or a model of this family (`model_type`) cannot use the backend."""
        ...

    def prepare_layers(self, layers: nn.ModuleList, config: Any, mesh: DeviceMesh | None) -> None:
        """Makes a Transformers model's layers ready for training, in place, before FSDP2 shards them.

        With a mesh, its ranks split the matrix products. `config` is the model's. Raises ConfigError if the layers do
        not fit.
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
