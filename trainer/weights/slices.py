"""Weights of several experts that are larger than a bucket go in slices along their first dimension.

A slice is named `name[first:end]`, with the experts that it holds.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SLICE = re.compile(r"(?P<name>.*)\[(?P<first>\d+):(?P<end>\d+)\]")
EXPERTS = 3  # dimensions of a weight of several experts: expert, row, column


def in_slices(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, most_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """The weights, those of experts that are larger than `most_bytes` in `dtype` as slices of at most that size."""
    for name, weight in weights:
        each = weight[0].numel() * dtype.itemsize if weight.dim() >= EXPERTS else 0
        if each == 0 or each * len(weight) <= most_bytes:
            yield name, weight
            continue
        step = max(1, most_bytes // each)
        for first in range(0, len(weight), step):
            part = weight[first : first + step]
            yield f"{name}[{first}:{first + len(part)}]", part


def joined(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights with slices joined, which must follow each other."""
    name, parts = "", list[Tensor]()
    for sent, weight in weights:
        match = _SLICE.fullmatch(sent)
        if parts and (match is None or match["name"] != name):
            yield name, torch.cat(parts)
            parts = []
        if match is None:
            yield sent, weight
        else:
            name = match["name"]
            parts.append(weight)
    if parts:
        yield name, torch.cat(parts)


def load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Calls a model's loader, with each slice by itself."""
    whole = list[tuple[str, Tensor]]()
    for name, weight in weights:
        match = _SLICE.fullmatch(name)
        if match is None:
            whole.append((name, weight))
            continue
        with _Place(int(match["first"]), int(match["end"])):
            model.load_weights([(match["name"], weight)])
    if whole:
        model.load_weights(whole)


class _Place(TorchFunctionMode):  # type: ignore[misc] # torch has no types here
    """Copies of a slice go to the place of its experts in a weight of all experts."""

    def __init__(self, first: int, end: int) -> None:
        super().__init__()
        self._first, self._count = first, end - first

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_ and args[1].shape[:1] == (self._count,) and len(args[0]) > self._count:
            args = (args[0].narrow(0, self._first, self._count), args[1])
        return function(*args, **(kwargs or {}))
