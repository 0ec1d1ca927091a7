"""Copies from the node's memory to a device."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device.

    On its way to a GPU it lies in pinned memory: from any other, the driver may first wait for what the GPU still has
    to do. torch keeps pinned memory until the copy is done, and then for the next one.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
