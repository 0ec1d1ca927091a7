"""The one seam to vLLM: nothing else in the trainer imports it, except the kernels of `trainer.models.exact`."""
