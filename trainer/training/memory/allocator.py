"""Configures torch's GPU allocator and releases its cache.

On NVIDIA GPUs the trainer uses expandable segments, which grow and shrink page by page. Fixed segments cannot free the
gaps between live tensors; with activations of changing sizes, the gaps can be a third of the memory.
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Page size of expandable segments. Each page is one driver call, and the driver serves the ranks of a node one at a
# time: with torch's 20 MiB, freeing 40 GiB takes one rank 0.15 s and four concurrent ranks 0.6 s.
PAGE_MIB = 128
# Torch's default, which is also its minimum for fixed segments.
TORCHS_PAGE_MIB = 20


def use_expandable_segments(device: torch.device, expand: bool = True) -> None:
    """Turns expandable segments on or off, unless the user turned them off in PYTORCH_CUDA_ALLOC_CONF.

    Does nothing on ROCm, which has no such segments.
    """
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if device.type != "cuda" or torch.version.hip is not None or "expandable_segments:False" in chosen:
        return
    settings = f"expandable_segments:{expand}"
    if "large_segment_size_mb" not in chosen:
        settings += f",large_segment_size_mb:{PAGE_MIB if expand else TORCHS_PAGE_MIB}"
    torch._C._accelerator_setAllocatorSettings(settings)


@contextmanager
def shareable_memory(device: torch.device) -> Iterator[None]:
    """Makes allocations inside the block shareable with another process (CUDA IPC).

    Sharing an expandable segment needs the right to take file descriptors of other processes (pidfd_getfd), which
    containers do not have by default.
    """
    use_expandable_segments(device, expand=False)
    try:
        yield
    finally:
        use_expandable_segments(device)


def give_back_memory() -> None:
    """Returns torch's cached memory, and unused shared memory, to other processes.

    Waits for the GPU first: torch unmaps pages of an expandable segment as soon as the stream that allocated them is
    idle (https://github.com/pytorch/pytorch/issues/196258), but FSDP allocates gradients in its own stream and the
    optimizer reads them in another. Does nothing without a GPU.
    """
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
