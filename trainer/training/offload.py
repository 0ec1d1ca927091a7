"""Tensors whose memory lies on CPU but for the time in which they are used."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.training.allocator import give_back_memory


class Offload:
    """Keeps the contents of some tensors on CPU, and gives their memory back, until they are needed.

    A tensor's memory is emptied and filled again in its place: views of it and FSDP's own references stay valid.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """`tensors` is asked each time: an optimizer makes its states at its first step. Of none, all this does
        nothing."""
        self._tensors = tensors
        self._users = 0
        self._written = False
        self._kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._empty()

    @contextmanager
    def needed(self, written: bool) -> Iterator[None]:
        """The contents are there within; it may be entered again within. What is not to be `written` is not copied
        back: changes to it are lost."""
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
            # What comes back would settle in the memory that activations left, and keep it whole.
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
                # Pinned: copies then run at the full speed of the bus.
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
