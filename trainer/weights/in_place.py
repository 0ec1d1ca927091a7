"""Copies buckets straight into the weights of a model on a GPU."""

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainer.errors import ConfigError
from trainer.weights.arrival import check_arrived, check_in_place
from trainer.weights.buckets import WORD_BYTES, Bucket, BucketLayout, SentBucket, word_sum
from trainer.weights.slices import load

logger = logging.getLogger(__name__)

KERNELS_WITH_LAYOUT_OF_FILES = {"TRITON", "BATCHED_TRITON"}


@dataclass(frozen=True)
class RecordedCopies:
    """The copies that a model's loader made from a bucket, to be repeated with other buckets of the same layout.

    `sources` are (shape, stride, offset) in elements. `keeps_words` means that no copy splits a 64-bit word, so that
    sums of 64-bit words can be compared.
    """

    targets: Sequence[Tensor]
    sources: Sequence[tuple[Sequence[int], Sequence[int], int]]
    keeps_words: bool

    def repeat(self, bucket: Bucket) -> None:
        torch._foreach_copy_(list(self.targets), self.pieces(bucket))

    def pieces(self, bucket: Bucket) -> list[Tensor]:
        """The parts of the bucket that are copied, in the order of `targets`."""
        weights = bucket.data.view(bucket.layout.dtype)
        start = weights.storage_offset()
        return [weights.as_strided(shape, stride, start + offset) for shape, stride, offset in self.sources]


@dataclass
class _Update:
    """An update under way. Of the model's weights, `waiting` are still to be summed, after the bucket that holds their
    last part, or at the end under None. `sums` are of the buckets: as packed, as found, and what the model took."""

    parameters: Sequence[Tensor]
    word: torch.dtype
    waiting: dict[BucketLayout | None, list[Tensor]]
    sums: list[Tensor] = field(default_factory=list)
    inside: list[Tensor] = field(default_factory=list)


class InPlaceLoader:
    """Loads all weights of a model, or of this rank's shard of it, once per update.

    A model's own loader decides in Python where each weight goes, which takes much longer than the copies on the GPU.
    So the first load records the copies, and later loads repeat them in one batch. A loader that does more than copy
    is called every time.
    """

    def __init__(self, model: nn.Module, sharded: bool = False) -> None:
        self._model = model
        self._sharded = sharded
        self._copies: dict[BucketLayout, RecordedCopies | None] = {}
        self._update = _Update((), torch.int16, {})

    def load(self, buckets: Iterable[SentBucket], begins: bool = True, ends: bool = True) -> None:
        """Copies buckets and waits for the copies: all of an update, or some, of which the first call `begins` and the
        last `ends` the update. Raises WorkerError if a bucket changed, and at the end if the model's weights differ.

        The comparison is by checksum: with that of the buckets, or of the parts of them that a shard copies. If the
        loader of a shard does more than copy, these parts are not known, and only the buckets are checked.

        Once all copies are known to keep 64-bit words whole, those are summed, which is fast. Each of the model's
        weights is then summed after its last bucket, while later buckets are still arriving.
        """
        if begins:
            parameters = list(self._model.parameters())
            word = torch.int64 if self._keeps_words() else torch.int16
            self._update = _Update(parameters, word, self._by_last_bucket(parameters))
        update = self._update
        for sent in buckets:
            bucket = sent.open()
            if bucket.layout not in self._copies:  # its copies are not known yet
                update.waiting, update.inside = {None: [*update.parameters]}, []
            self._copy(bucket)
            arrived = bucket.sum
            given = self._given(bucket, arrived, update.word)
            update.sums.append(torch.stack([bucket.packed_sum, arrived, given]))
            if bucket.layout in update.waiting:
                update.inside.append(word_sum(update.waiting.pop(bucket.layout), update.word))
            del sent, bucket  # frees memory for the next bucket
        if ends:
            update.inside += [word_sum(rest, update.word) for rest in update.waiting.values()]
        # Waits for the copies. The sender may free its buckets after this.
        packed, arrived, given = torch.stack(update.sums).sum(dim=0).tolist()
        check_arrived(arrived, packed)
        if ends and (not self._sharded or None not in self._copies.values()):
            check_in_place(int(torch.stack(update.inside).sum()), given)

    def _given(self, bucket: Bucket, arrived: Tensor, word: torch.dtype) -> Tensor:
        """The checksum in words of what the model took from a bucket; `found` is the bucket's own."""
        if not self._sharded:
            return arrived if word is torch.int64 else word_sum(bucket.layout.tensors(bucket.data), word)
        copies = self._copies[bucket.layout]
        return word_sum(copies.pieces(bucket), word) if copies else torch.zeros_like(arrived)

    def _by_last_bucket(self, parameters: Sequence[Tensor]) -> dict[BucketLayout | None, list[Tensor]]:
        """The weights grouped by the bucket that holds their last part; under None if that is not known."""
        last: dict[int, BucketLayout] = {}
        if self._keeps_words():
            for layout, copies in self._copies.items():
                last |= {target.untyped_storage().data_ptr(): layout for target in copies.targets} if copies else {}
        grouped: dict[BucketLayout | None, list[Tensor]] = {}
        for parameter in parameters:
            grouped.setdefault(last.get(parameter.untyped_storage().data_ptr()), []).append(parameter)
        return grouped

    def _keeps_words(self) -> bool:
        return bool(self._copies) and all(copies and copies.keeps_words for copies in self._copies.values())

    def _copy(self, bucket: Bucket) -> None:
        if bucket.layout not in self._copies:
            copies = record(self._model, bucket, self._sharded)
            if copies is None and None not in self._copies.values():
                logger.info(
                    "weights go through the engine's own loader in every update, because it does more than copy"
                )
            self._copies[bucket.layout] = copies
        elif copies := self._copies[bucket.layout]:
            copies.repeat(bucket)
        else:
            load(self._model, bucket.tensors())


def check_layout(model: nn.Module) -> None:
    """Raises ConfigError if vLLM keeps experts in another layout than the files: copies would put rows in wrong places.

    `unquantized_backend` of a layer's `quant_method` names the kernels, in vLLM 0.26 and 0.32.
    """
    for name, module in model.named_modules():
        kernels = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if kernels is not None and kernels.name not in KERNELS_WITH_LAYOUT_OF_FILES:
            raise ConfigError(
                f"vLLM computes the experts of {name} with {kernels.value}, which reorders their weights: an update "
                "in place would give wrong numbers",
                hint="unset the variables of vLLM that choose kernels of experts (VLLM_USE_FLASHINFER_MOE_FP16, "
                "VLLM_ROCM_USE_AITER_MOE), or set rollout.engine=transformers",
            )


def derive_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Computes again what vLLM's latent attention (MLA) derives from its weights, into the same memory."""
    for module in model.modules():
        if hasattr(module, "W_UK_T"):
            module.process_weights_after_loading(dtype)


def record(model: nn.Module, bucket: Bucket, sharded: bool = False) -> RecordedCopies | None:
    """Loads a bucket and returns the copies made. None unless they copy the whole bucket into the model's weights; of a
    shard, a part of every weight in the bucket."""
    with CopyRecorder() as recorder, torch.no_grad():
        load(model, bucket.tensors())
    storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    copies = [
        (target, source)
        for target, source in recorder.copies
        if _is_plain(target, source, bucket) and target.untyped_storage().data_ptr() in storages
    ]
    sources = [source for _, source in copies]
    complete = _from_every_weight(bucket, sources) if sharded else _nbytes(sources) == bucket.layout.nbytes
    if len(copies) < len(recorder.copies) or not complete:
        return None
    itemsize = bucket.layout.dtype.itemsize
    starts = [(source.data_ptr() - bucket.data.data_ptr()) // itemsize for _, source in copies]
    return RecordedCopies(
        targets=[target.detach().as_subclass(Tensor) for target, _ in copies],
        sources=[(source.shape, source.stride(), start) for start, (_, source) in zip(starts, copies, strict=True)],
        keeps_words=all(target.dtype == source.dtype for target, source in copies)
        and all(map(_is_of_words, chain(*copies, model.parameters()))),
    )


class CopyRecorder(TorchFunctionMode):  # type: ignore[misc]
    """Records target and source of every `Tensor.copy_`. The source of what was made contiguous is what it was before:
    `copy_` takes any strides."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self._contiguous: dict[int, tuple[Tensor, Tensor]] = {}  # kept, so that no other tensor gets its memory

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_:
            made, before = self._contiguous.get(args[1].data_ptr(), (args[1], args[1]))
            same = (made.shape, made.stride()) == (args[1].shape, args[1].stride())
            self.copies.append((args[0], before if same else args[1]))
        result = function(*args, **(kwargs or {}))
        if function is Tensor.contiguous:
            self._contiguous[result.data_ptr()] = result, args[0]
        return result


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _from_every_weight(bucket: Bucket, sources: Sequence[Tensor]) -> bool:
    """Whether each weight of a bucket is the source of a copy."""
    starts = sorted(source.data_ptr() for source in sources)

    def is_read(weight: Tensor) -> bool:
        first = bisect_left(starts, weight.data_ptr())
        return first < len(starts) and starts[first] < weight.data_ptr() + weight.nbytes

    return all(is_read(weight) for weight in bucket.layout.tensors(bucket.data))


def _is_plain(target: Tensor, source: Tensor, bucket: Bucket) -> bool:
    """Whether a copy reads from the bucket and keeps its shape and 16-bit words: those of bfloat16 are in float32."""
    same = (target.shape, target.device) == (source.shape, source.device)
    types = {(source.dtype, source.dtype), (torch.bfloat16, torch.float32)}
    kept = (source.dtype, target.dtype) in types and source.dtype == bucket.layout.dtype
    return _is_inside(source, bucket) and same and kept


def _is_inside(tensor: Tensor, bucket: Bucket) -> bool:
    return bool(0 <= tensor.data_ptr() - bucket.data.data_ptr() < bucket.layout.size)


def _is_of_words(tensor: Tensor) -> bool:
    """Whether a tensor consists of whole 64-bit words, aligned from the start of its storage."""
    word = WORD_BYTES // tensor.itemsize
    steps = [tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1]] if tensor.dim() else [1]
    return all(step % word == 0 for step in steps) and tensor.stride(-1) == 1
