"""Formulas compiled for GPUs: one pass over their inputs instead of one per operation."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def for_any_length(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function, compiled on GPUs for tensors whose first dimension varies."""
    if device != "cuda":
        return function
    compiled = torch.compile(function)

    def call(*arguments: Any) -> Any:
        # Otherwise torch would compile for the length of the first call, and again when the next one differs.
        for argument in arguments:
            if isinstance(argument, Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*arguments)

    return call
