"""Megatron-Core's layers in place of Transformers'. The package megatron-core is imported when it is first needed."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.errors import ConfigError
from trainer.models.backend import Network, TrainingBackend
from trainer.models.megatron_weights import Origins, origins

# `model_type` of the families that trainer/models/megatron.py is tested with.
FAMILIES = ("qwen2", "qwen3", "llama", "mistral")


class Megatron:
    """Replaces Transformers' layers by Megatron-Core's with the same weights."""

    compiles_layers = False
    takes_adapters = False
    needs_weights = True

    def check(self, role: str, model: Mapping[str, Any]) -> None:
        family = model.get("model_type")
        if not all(importlib.util.find_spec(name) for name in ("megatron", "megatron.core")):
            raise ConfigError(
                f"{role}.backend=megatron: megatron-core is not installed here",
                hint=f"pip install 'megatron-core>=0.16.1,<0.17' on every node, or set {role}.backend=fsdp",
            )
        if family not in FAMILIES:
            raise ConfigError(
                f"{role}.backend=megatron does not support {family} models",
                hint=f"use one of {', '.join(FAMILIES)}, or set {role}.backend=fsdp",
            )

    def prepare(self, network: Network, device: torch.device, mesh: DeviceMesh | None) -> None:  # noqa: ARG002
        from trainer.models.megatron import use_megatron_layers

        use_megatron_layers(network.decoder.layers, network.decoder.config, mesh)

    def origins(self, config: Any, ranks: int) -> Origins:
        return origins(config, ranks)


BACKEND: TrainingBackend = Megatron()
