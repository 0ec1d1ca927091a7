"""Transformers' layers with the operators of vLLM's engines, for log-probs that equal the engines' to the bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.errors import ConfigError
from trainer.models.backend import Network, TrainingBackend
from trainer.models.exact.layers import use_operators
from trainer.models.megatron_weights import Origins
from trainer.models.networks import PolicyNetwork

# What was found equal to the bit on a GPU: `python -m benchmarks.gpu.exactness`.
FAMILIES = ("qwen2",)
HEAD_WIDTH = 128
HOPPER = (9, 0)


class Exact:
    """Replaces the forward passes of the layers, the last norm and the head; weights stay Transformers' own."""

    compiles_layers = False
    takes_adapters = False
    needs_weights = False

    def check(self, role: str, model: Mapping[str, Any]) -> None:
        if (problem := _unfit(role, model)) is not None:
            raise ConfigError(f"{role}.backend=exact {problem}", hint=f"set {role}.backend=fsdp")

    def prepare(self, network: Network, device: torch.device, mesh: DeviceMesh | None) -> None:
        assert mesh is None, "the settings refuse split matrix products"
        assert network.context is None, "the settings refuse rows that several ranks compute together"
        assert isinstance(network, PolicyNetwork), "`check` refuses critics"
        if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability() != HOPPER:
            raise ConfigError(
                "backend=exact needs NVIDIA GPUs of compute capability 9.0 (H100, H200): on others, log-probs of "
                "engine and trainer may differ",
                hint="set actor.backend=fsdp",
            )
        try:
            from trainer.models.exact.kernels import OPERATORS
        except ImportError as error:
            raise ConfigError(
                f"backend=exact: this release of vLLM lacks a kernel of vLLM 0.26: {error}",
                hint="use an image with vLLM 0.26, or set actor.backend=fsdp",
            ) from error
        use_operators(network, OPERATORS)

    def origins(self, config: Any, ranks: int) -> Origins:  # noqa: ARG002 - part of the protocol
        return {}


def _unfit(role: str, model: Mapping[str, Any]) -> str | None:
    """Why these layers cannot have the engines' operators; None if they can."""
    family, rotation = model.get("model_type"), model.get("rope_parameters") or model.get("rope_scaling") or {}
    heads = model.get("num_attention_heads") or 1
    width = model.get("head_dim") or int(model.get("hidden_size", 0)) // heads
    if role != "actor":
        return "has no use: engines sample with the actor's weights only"
    if family not in FAMILIES:
        return f"does not support {family} models, only {', '.join(FAMILIES)} (Qwen2 and Qwen2.5)"
    if width != HEAD_WIDTH:
        return f"does not support attention heads of {width}, only of {HEAD_WIDTH} (Qwen2.5 from 1.5B on)"
    if rotation.get("rope_type", rotation.get("type", "default")) != "default":
        return "does not support scaled rotations (rope_scaling)"
    if model.get("use_sliding_window"):
        return "does not support sliding windows"
    return None


BACKEND: TrainingBackend = Exact()
