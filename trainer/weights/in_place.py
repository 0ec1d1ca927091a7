"""Buckets into the weights that a model on a GPU computes with."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.weights.arrival import check_arrived, check_in_place
from trainer.weights.buckets import WORD_BYTES, Bucket, Layout, SentBucket, word_sum

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copies:
    """What a model's loader copied from a bucket, to be copied again from another one with the same layout.

    `sources` are shape, stride and offset, in elements. `keeps_words` says that a sum of 64-bit words stays what it is.
    """

    targets: Sequence[Tensor]
    sources: Sequence[tuple[Sequence[int], Sequence[int], int]]
    keeps_words: bool

    def repeat(self, bucket: Bucket) -> None:
        weights = bucket.data.view(bucket.layout.dtype)
        start = weights.storage_offset()
        pieces = [weights.as_strided(shape, stride, start + offset) for shape, stride, offset in self.sources]
        torch._foreach_copy_(list(self.targets), pieces)


class InPlaceLoader:
    """Loads all weights again and again.

    A model's loader decides weight by weight where each goes, which takes Python much longer than it takes the GPU to
    copy. So what it copies is recorded the first time, and from then on copied all at once. A loader that does more
    than copy is asked each time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[Layout, Copies | None] = {}

    def load(self, buckets: Iterable[SentBucket]) -> None:
        """Returns when all is copied. Raises WorkerError if the model's weights are then not those that were packed.

        Both are summed up: by 64-bit words, which is fast, once it is known that all of them stay together. The model's
        are then summed beside the buckets that are still coming, each when its last part is there.
        """
        parameters = list(self._model.parameters())
        word = torch.int64 if self._keeps_words() else torch.int16
        waiting = self._by_last_bucket(parameters)
        sums: list[Tensor] = []
        inside: list[Tensor] = []
        for sent in buckets:
            bucket = sent.open()
            if bucket.layout not in self._copies:  # nobody knows yet what it writes
                waiting, inside = {None: parameters}, []
            self._copy(bucket)
            found = bucket.sum
            given = found if word is torch.int64 else word_sum(bucket.layout.tensors(bucket.data), word)
            sums.append(torch.stack([bucket.packed_sum, found, given]))
            if bucket.layout in waiting:
                inside.append(word_sum(waiting.pop(bucket.layout), word))
            del sent, bucket  # its memory may be wanted for the next
        inside += [word_sum(rest, word) for rest in waiting.values()]
        packed, found, given = torch.stack(sums).sum(dim=0).tolist()  # waits for the copies: now the sender may free
        check_arrived(found, packed)
        check_in_place(int(torch.stack(inside).sum()), given)

    def _by_last_bucket(self, parameters: Sequence[Tensor]) -> dict[Layout | None, list[Tensor]]:
        """The weights by the bucket that has their last part; under None where that is not known."""
        last: dict[int, Layout] = {}
        if self._keeps_words():
            for layout, copies in self._copies.items():
                last |= {target.untyped_storage().data_ptr(): layout for target in copies.targets} if copies else {}
        grouped: dict[Layout | None, list[Tensor]] = {}
        for parameter in parameters:
            grouped.setdefault(last.get(parameter.untyped_storage().data_ptr()), []).append(parameter)
        return grouped

    def _keeps_words(self) -> bool:
        return bool(self._copies) and all(copies and copies.keeps_words for copies in self._copies.values())

    def _copy(self, bucket: Bucket) -> None:
        if bucket.layout not in self._copies:
            copies = record(self._model, bucket)
            if copies is None and None not in self._copies.values():
                logger.info("the engine's model does more than copy its weights: they are loaded one by one each time")
            self._copies[bucket.layout] = copies
        elif copies := self._copies[bucket.layout]:
            copies.repeat(bucket)
        else:
            self._model.load_weights(bucket.tensors())


def record(model: nn.Module, bucket: Bucket) -> Copies | None:
    """Loads a bucket; what was copied, or nothing if that was not the whole bucket, into the model's own weights."""
    with _Recorder() as recorder, torch.no_grad():
        model.load_weights(bucket.tensors())
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    copies = [
        (target, source)
        for target, source in recorder.copies
        if _is_plain(target, source, bucket) and target.untyped_storage().data_ptr() in own
    ]
    if len(copies) < len(recorder.copies) or sum(source.nbytes for _, source in copies) != bucket.layout.nbytes:
        return None
    itemsize = bucket.layout.dtype.itemsize
    starts = [(source.data_ptr() - bucket.data.data_ptr()) // itemsize for _, source in copies]
    return Copies(
        targets=[target.detach().as_subclass(Tensor) for target, _ in copies],
        sources=[(source.shape, source.stride(), start) for start, (_, source) in zip(starts, copies, strict=True)],
        keeps_words=all(map(_is_of_words, chain(*copies, model.parameters()))),
    )


class _Recorder(TorchFunctionMode):  # type: ignore[misc]
    """Keeps what is copied, and whereto."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_:
            self.copies.append((args[0], args[1]))
        return function(*args, **(kwargs or {}))


def _is_plain(target: Tensor, source: Tensor, bucket: Bucket) -> bool:
    """Whether a copy takes a part of the bucket as it is."""
    inside = 0 <= source.data_ptr() - bucket.data.data_ptr() < bucket.layout.size
    same = (target.shape, target.dtype, target.device) == (source.shape, source.dtype, source.device)
    return inside and same and source.dtype == bucket.layout.dtype


def _is_of_words(tensor: Tensor) -> bool:
    """Whether it consists of whole 64-bit words, as they are counted from the beginning of its memory."""
    word = WORD_BYTES // tensor.itemsize
    steps = [tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1]] if tensor.dim() else [1]
    return all(step % word == 0 for step in steps) and tensor.stride(-1) == 1
