"""Transformers' own layers."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.models.backend import TrainingBackend
from trainer.models.megatron_weights import Origins
from trainer.models.tensor_parallel import split_layers


class Fsdp:
    """Keeps Transformers' layers; with a mesh, splits their matrix products."""

    compiles_layers = True
    takes_adapters = True
    needs_weights = False

    def check(self, role: str, family: str | None) -> None:
        """Accepts every model."""

    def prepare_layers(self, layers: nn.ModuleList, config: Any, mesh: DeviceMesh | None) -> None:
        if mesh is not None:
            split_layers(layers, config, mesh)

    def origins(self, config: Any, ranks: int) -> Origins:  # noqa: ARG002 - part of the protocol
        return {}


BACKEND: TrainingBackend = Fsdp()
