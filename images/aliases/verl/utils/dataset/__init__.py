"""The dataset class that others derive from."""

from verl.utils.dataset.rl_dataset import RLHFDataset

__all__ = ["RLHFDataset"]
