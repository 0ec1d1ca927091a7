"""Transformers' own layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.models.backend import Network, TrainingBackend
from trainer.models.megatron_weights import Origins
from trainer.models.tensor_parallel import split_layers


class Fsdp:
    """Keeps Transformers' layers; with a mesh, splits their matrix products."""

    compiles_layers = True
    takes_adapters = True
    needs_weights = False

    def check(self, role: str, model: Mapping[str, Any]) -> None:
        """Accepts every model."""

    def prepare(self, network: Network, device: torch.device, mesh: DeviceMesh | None) -> None:  # noqa: ARG002
        if mesh is not None:
            split_layers(network.decoder.layers, network.decoder.config, mesh)

    def origins(self, config: Any, ranks: int) -> Origins:  # noqa: ARG002 - part of the protocol
        return {}


BACKEND: TrainingBackend = Fsdp()
