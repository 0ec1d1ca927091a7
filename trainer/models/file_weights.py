"""Weights that stay in their files until an operation needs them.

Transformers' `from_pretrained` builds a model from them as from tensors in memory: it renames them, joins experts,
splits fused matrices and converts types, and all of that only notes where the numbers lie. Each rank then reads its
own slices, and a forward pass on CPU reads one weight at a time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trainer.models.weight_files import weight_files

_ATEN = torch.ops.aten
_SAME = {_ATEN.detach, _ATEN.alias, _ATEN.clone}
# Operations of the conversions that only choose and order numbers. torch finds the result in a memory map.
_VIEWS = {
    *(_ATEN.slice, _ATEN.select, _ATEN.split, _ATEN.split_with_sizes, _ATEN.unbind),
    *(_ATEN.transpose, _ATEN.permute, _ATEN.unsqueeze, _ATEN.squeeze),
}


class FileWeight(Tensor):  # type: ignore[misc] # torch has no types here
    """A CPU tensor of the type `dtype`: parts of one type, joined along `axis`.

    Parts are memory maps of files, or such tensors. Operations that change it raise TypeError.
    """

    parts: Sequence[Tensor]
    axis: int
    stored_dtype: torch.dtype

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], axis: int = 0, dtype: torch.dtype | None = None) -> "FileWeight":
        shape = list(parts[0].shape)
        if len(parts) > 1:
            shape[axis] = sum(part.shape[axis] for part in parts)
        made: FileWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype or parts[0].dtype, device="cpu")
        made.parts, made.axis = parts, axis
        made.stored_dtype = parts[0].stored_dtype if isinstance(parts[0], FileWeight) else parts[0].dtype
        return made

    def read_into(self, target: Tensor, start: Sequence[int]) -> None:
        """Fills `target`, on any device, with the slice of its shape that begins at `start`."""
        if len(self.parts) == 1:
            _read_into(target, self.parts[0], start)
            return
        axis = self.axis
        begin, first, last = 0, start[axis], start[axis] + target.shape[axis]
        for part in self.parts:
            end = begin + part.shape[axis]
            lower, upper = max(begin, first), min(end, last)
            if lower < upper:
                inner = [*start[:axis], lower - begin, *start[axis + 1 :]]
                _read_into(target.narrow(axis, lower - first, upper - lower), part, inner)
            begin = end

    def whole(self) -> Tensor:
        """All of its numbers, in memory."""
        read = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(read, [0] * self.dim())
        return read

    def first_bytes(self, count: int = 64) -> bytes:
        """The first numbers as stored, at most `count` bytes."""
        part = self.parts[0]
        if isinstance(part, FileWeight):
            return part.first_bytes(count)
        numbers = part[(slice(1),) * (part.dim() - 1)].flatten()[:count].contiguous()
        return bytes(numbers.view(torch.uint8)[:count].tolist())

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, packet = kwargs or {}, function.overloadpacket
        if function is _ATEN.copy_.default and not isinstance(args[0], FileWeight):
            args[1].read_into(args[0], [0] * args[0].dim())
            return args[0]
        if function._schema.is_mutable:
            raise TypeError(f"{function} would change a weight that is in its file")
        weight = next((argument for argument in args if isinstance(argument, FileWeight)), None)
        if weight is not None and packet in _SAME:
            return FileWeight(weight.parts, weight.axis, weight.dtype)
        if weight is not None and (result := weight._unread(function, args, kwargs)) is not None:
            return result
        if packet in (_ATEN.cat, _ATEN.stack) and _joinable(args[0]):
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (args[0][0].dim() + (packet is _ATEN.stack))
            parts = [part.unsqueeze(dim) for part in args[0]] if packet is _ATEN.stack else args[0]
            return FileWeight(parts, dim, parts[0].dtype)
        args, kwargs = tree_map_only(FileWeight, FileWeight.whole, (args, kwargs))
        return function(*args, **kwargs)

    def _unread(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation that reads nothing, or only what the result needs; None if this is no such."""
        packet, stored = function.overloadpacket, self.parts[0]
        if packet is _ATEN._to_copy:
            dtype = kwargs.get("dtype") or self.dtype
            stays = torch.device(kwargs.get("device") or "cpu").type == "cpu"
            return FileWeight(self.parts, self.axis, dtype) if stays and self.dtype == self.stored_dtype else None
        if len(self.parts) == 1 and not isinstance(stored, FileWeight):
            if packet in _VIEWS or packet is _ATEN.embedding:
                result = function(*(stored if argument is self else argument for argument in args), **kwargs)
                wrapped = tree_map_only(Tensor, lambda part: FileWeight([part], 0, self.dtype), result)
                return wrapped.whole() if packet is _ATEN.embedding else wrapped
            if packet in (_ATEN.view, _ATEN._unsafe_view):
                return FileWeight([stored.reshape(args[1])], 0, self.dtype)
        if packet is _ATEN.select:  # an expert of a layer
            dim, index = args[1] % self.dim(), args[2] % self.shape[args[1]]
            read = torch.empty([1 if at == dim else size for at, size in enumerate(self.shape)], dtype=self.dtype)
            self.read_into(read, [index if at == dim else 0 for at in range(self.dim())])
            return read.squeeze(dim)
        return None


def file_weights(model: Path) -> dict[str, Tensor]:
    """The weights in the safetensors files of a model, by their names there. Raises DataError, OSError."""
    return {
        name: FileWeight([opened.get_tensor(name)])
        for file in weight_files(model)
        for opened in [safe_open(file, "pt")]
        for name in opened.keys()  # noqa: SIM118 - not a dictionary
    }


def _joinable(parts: Sequence[Tensor]) -> bool:
    return all(isinstance(part, FileWeight) for part in parts) and (
        len({(part.dtype, part.stored_dtype) for part in parts}) == 1
    )


def _read_into(target: Tensor, source: Tensor, start: Sequence[int]) -> None:
    if isinstance(source, FileWeight):
        source.read_into(target, start)
        return
    for dim, (first, size) in enumerate(zip(start, target.shape, strict=True)):
        source = source.narrow(dim, first, size)
    target.copy_(source)
