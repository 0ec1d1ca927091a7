"""Tensors that stay in CPU memory while they are not in use."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.training.memory.allocator import give_back_memory


class Offload:
    """Moves the contents of tensors to the CPU and frees their device memory until they are needed.

    The storage of a tensor is resized in place, so views of it and FSDP's own references stay valid.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """`tensors` is called each time, because an optimizer creates its state at its first step. It may be empty."""
        self._tensors = tensors
        self._users = 0
        self._written = False
        self._kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._empty()

    @contextmanager
    def needed(self, written: bool) -> Iterator[None]:
        """Holds the contents on the device while the block runs. Blocks may nest.

        Only contents that are `written` are copied back; other changes are lost.
        """
        if self._users == 0:
            self._fill()
        self._users += 1
        self._written |= written
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._empty()

    def _fill(self) -> None:
        if self._kept:
            # The contents would otherwise land in cached activation memory, which could then not be freed.
            give_back_memory()
        for storage, kept in self._kept.values():
            storage.resize_(kept.nbytes)
            storage.copy_(kept.untyped_storage(), non_blocking=True)
        self._wait_for_copies()

    def _empty(self) -> None:
        known, self._kept = self._kept, {}
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.detach().untyped_storage()
            if storage.nbytes() == 0:
                continue
            _, kept = known.get(storage._cdata, (None, None))
            copied = kept is not None and not self._written
            if kept is None:
                # Copies to and from pinned memory run at the full speed of the bus.
                kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=local.is_cuda)
            if not copied:
                kept.untyped_storage().copy_(storage, non_blocking=True)
            self._kept[storage._cdata] = storage, kept
        self._written = False
        self._wait_for_copies()
        for storage, _ in self._kept.values():
            storage.resize_(0)

    def _wait_for_copies(self) -> None:
        if self._kept and torch.cuda.is_available():
            torch.cuda.synchronize()
