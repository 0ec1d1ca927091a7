"""Bit-for-bit repeatable computation (`trainer.deterministic`)."""

# Variables that libraries read when they start.
ENVIRONMENT = {
    # cuBLAS chooses a workspace per stream otherwise, and with it how it splits sums.
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # vLLM's kernels whose results for a response do not depend on the others in the batch.
    # https://docs.vllm.ai/en/latest/features/batch_invariance/
    "VLLM_BATCH_INVARIANT": "1",
}


def compute_deterministically() -> None:
    """Makes torch use kernels with a fixed order of sums, and raise RuntimeError where it has none."""
    import torch
    import torch.utils.deterministic

    torch.use_deterministic_algorithms(True)
    # Torch would also fill new memory, for programs that read it before they write it.
    torch.utils.deterministic.fill_uninitialized_memory = False
