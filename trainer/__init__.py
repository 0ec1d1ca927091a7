"""PPO on Ray, vLLM and torch: `trainer.train` from Python, `python -m trainer` on a command line."""

from trainer.api import Run, train

__all__ = ["Run", "train"]
