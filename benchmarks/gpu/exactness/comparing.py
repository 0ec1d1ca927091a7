"""Bits and times beside each other."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import Results, seconds

logger = logging.getLogger("exactness")


@contextmanager
def reported(results: Results, what: str) -> Iterator[None]:
    """A part that fails leaves a row with its error, and the next begins."""
    try:
        yield
    except Exception as error:
        logger.exception("%s", what)
        results.add(failed=what, error=f"{type(error).__name__}: {error}"[:500])


def unequal(found: Tensor, expected: Tensor) -> int:
    """Number of elements whose bits differ."""
    kind = {2: torch.int16, 4: torch.int32}[found.element_size()]
    return int((found.contiguous().view(kind) != expected.contiguous().view(kind)).sum())


def apart(found: Tensor, expected: Tensor) -> dict[str, Any]:
    # On the CPU, because vLLM's batch-invariant mode replaces `mean` on the GPU.
    gap = (found.detach().cpu().double() - expected.detach().cpu().double()).abs()
    return {
        "of": found.numel(),
        "equal": found.numel() - unequal(found, expected),
        "largest": float(gap.max()),
        "mean": float(gap.mean()),
    }


def milliseconds(action: Callable[[], Any], repeats: int = 9) -> float:
    """Median of GPU time, after two runs to warm up."""
    if not torch.cuda.is_available():
        return round(1000 * seconds(action, 1), 3)
    action()
    action()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(float(sorted(times)[repeats // 2]), 4)
