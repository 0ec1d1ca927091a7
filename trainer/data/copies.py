"""Copies between the node's memory and a device."""

from collections.abc import Sequence

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


class HostCopies:
    """Tensors of a GPU in the node's memory, copied beside what the GPU goes on to do.

    That memory is pinned, which takes long, and is therefore used again. Tensors that are there already are not copied.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Copies these in place of the ones before. They may be dropped at once, but not be written to."""
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
                tensor.record_stream(self._stream)  # its memory is not used for others before this copy is done

    def take(self) -> list[Tensor]:
        """Waits for the copies. They are good until the next ones are started."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._copies
