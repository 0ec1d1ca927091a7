"""The dataset class that others derive from."""

from trainer.data.derived_dataset import RLHFDataset

__all__ = ["RLHFDataset"]
