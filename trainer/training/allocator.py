"""How torch takes memory of a GPU, and gives it back.

On NVIDIA's GPUs in segments that grow and shrink page by page. Those of a fixed size keep what lies between live
tensors; of activations whose sizes change that can be a third.
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# The pages by which segments expand. Each costs a call of the driver, which all ranks of a node wait for one after the
# other: with torch's 20 MiB, giving 40 GiB back takes one rank 0.15 s, and four at once 0.6 s.
PAGE_MIB = 128
# Torch's own, which is also the least that a fixed segment takes.
TORCHS_PAGE_MIB = 20


def use_expandable_segments(device: torch.device, expand: bool = True) -> None:
    """From now on, unless the user's PYTORCH_CUDA_ALLOC_CONF says otherwise. ROCm has no such segments."""
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if device.type != "cuda" or torch.version.hip is not None or "expandable_segments:False" in chosen:
        return
    settings = f"expandable_segments:{expand}"
    if "large_segment_size_mb" not in chosen:
        settings += f",large_segment_size_mb:{PAGE_MIB if expand else TORCHS_PAGE_MIB}"
    torch._C._accelerator_setAllocatorSettings(settings)


@contextmanager
def shareable_memory(device: torch.device) -> Iterator[None]:
    """What is allocated within can be opened by another process: segments that expand need a right for that (to take
    file descriptors of other processes, pidfd_getfd) which containers do not have by default."""
    use_expandable_segments(device, expand=False)
    try:
        yield
    finally:
        use_expandable_segments(device)


def give_back_memory() -> None:
    """Leaves to other processes what torch keeps in store, and what was shared and nobody reads any more.

    Waits for the GPU first. From a segment that expands, torch takes pages away as soon as the stream that they were
    allocated in is idle (https://github.com/pytorch/pytorch/issues/196258); FSDP allocates gradients in a stream of its
    own, and the optimizer reads them in another. Without a GPU there is nothing to give back.
    """
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
