"""Random tensors for the tests of formulas."""

import torch
from hypothesis import strategies as st

seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_mask(seed: int, *shape: int) -> torch.Tensor:
    """About 60 % True, and at least the first column."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[:, 0] = True
    return mask
