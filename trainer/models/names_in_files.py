"""The weights of a language model in the form of its files, from which engines load: Transformers joins experts and
renames modules, and its reverse conversion tells which part of a weight is which tensor of the files."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from trainer.models.file_weights import FileWeight


class View(NamedTuple):
    """A tensor of the files as a view of a whole, contiguous weight."""

    name: str
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int

    def of(self, weight: Tensor) -> Tensor:
        return weight.as_strided(self.shape, self.stride, weight.storage_offset() + self.offset)


def views_in_files(language_model: nn.Module, weights: Mapping[str, Sequence[int]]) -> dict[str, list[View]] | None:
    """The tensors of the files in each weight, given the shapes of all weights by Transformers' names.

    None if tensors of the files are no views: if Transformers splits or computes with what is in the files.
    """
    # All weights are parts of one line without memory, so that an offset tells the weight.
    starts, names, total = list[int](), list(weights), 0
    for shape in weights.values():
        starts.append(total)
        total += math.prod(shape)
    line = torch.empty(total, device="meta")
    state = {
        name: FileWeight([line[start : start + math.prod(weights[name])].view(tuple(weights[name]))])
        for name, start in zip(names, starts, strict=True)
    }
    try:
        in_files = revert_weight_conversion(language_model, state)
    except NotImplementedError:  # numbers would be read, but there are none
        return None
    views: dict[str, list[View]] = {name: [] for name in names}
    for name, tensor in in_files.items():
        if not isinstance(tensor, FileWeight) or len(tensor.parts) > 1:
            return None
        (part,) = tensor.parts
        place = bisect_right(starts, part.storage_offset()) - 1
        views[names[place]].append(View(name, part.shape, part.stride(), part.storage_offset() - starts[place]))
    covered = {name: sum(math.prod(view.shape) for view in parts) for name, parts in views.items()}
    return views if all(covered[name] == math.prod(shape) for name, shape in weights.items()) else None


def as_in_files(
    weights: Iterable[tuple[str, Tensor]], views: Mapping[str, Sequence[View]] | None
) -> Iterator[tuple[str, Tensor]]:
    """Whole weights as tensors of the files, which share their memory; as they are without `views`."""
    for name, weight in weights:
        if views is None:
            yield name, weight
        else:
            yield from ((view.name, view.of(weight.contiguous())) for view in views[name])
