"""Copies between CPU memory and a device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device.

    A copy to a GPU goes through pinned memory. From pageable memory the driver may first wait for the GPU's queued
    work. torch keeps the pinned memory until the copy is done and then reuses it.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopies:
    """Copies of GPU tensors in CPU memory, made while the GPU continues to work.

    The memory is pinned and reused, because pinning is slow. Tensors on the CPU are kept without a copy.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Starts copying the tensors, which replace the previous copies. The caller may drop but not modify them."""
        if tensors[0].device.type == "cpu":
            self._copies = list(tensors)
            return
        if [(copy.shape, copy.dtype) for copy in self._copies] != [(tensor.shape, tensor.dtype) for tensor in tensors]:
            self._copies = []  # frees the old ones first
            self._copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)  # keeps torch from reusing the memory before the copy is done

    def take(self) -> list[Tensor]:
        """Waits for the copies and returns them. They are valid until the next `start`."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._copies
