"""Compares a network's own log-probs with plain Transformers' before the first step.

A run that computes other log-probs than the model defines learns something else without a sign of it. The yardstick is
computed on CPU with the weights as loaded, one row at a time, so that the comparison covers packing, attention, the
head, precision, sharding, split matrices and the training backend.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from trainer.algorithms.log_probs import log_probs_and_entropy
from trainer.data.batch import Batch
from trainer.data.partition import MicroBatchLimit
from trainer.errors import DataError
from trainer.training.engine import TrainingEngine

# Prompt and response lengths of the two rows. They differ, so that a row that reads another one shows.
PROMPTS, RESPONSES = (5, 3), (8, 14)
# Rounding changes log-probs by fewer units in the last place, on average over a row. Measured: 6 with Qwen2's shape of
# 7B in bfloat16, 6 with Mamba; a forgotten scale, bias or state makes hundreds.
UNITS = 32
# The smallest difference that counts, for networks in float32.
LEAST = 1e-3


def check_rows(vocabulary: int) -> Batch:
    """Two rows of different lengths; their tokens are the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def tokens(lengths: tuple[int, ...]) -> list[list[int]]:
        return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]

    return Batch.from_responses(tokens(PROMPTS), tokens(RESPONSES), None)


@torch.no_grad()
def transformers_log_probs(language_model: nn.Module, rows: Batch, temperature: float) -> Tensor:
    """Log-probs by Transformers' own forward pass, row by row, [rows, response length] float32.

    Uses eager attention, because Transformers' faster ones ignore soft caps.
    """
    own = language_model.config._attn_implementation
    language_model.eval().set_attn_implementation("eager")
    found = torch.zeros(rows.response_mask.shape)
    for row in range(len(rows)):
        prompt, length = int(rows.prompt_lengths[row]), int(rows.lengths[row])
        ids = rows.token_ids[row : row + 1, :length]
        logits = language_model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1]
        found[row, : length - prompt], _ = log_probs_and_entropy(logits, ids[0, prompt:], temperature)
    language_model.set_attn_implementation(own)
    return found


def check_log_probs(engine: TrainingEngine, rows: Batch, expected: Tensor | None, family: str) -> None:
    """Compares the engine's log-probs of the rows with the expected ones.

    Every rank must call it; `expected` is None on all but the first. Raises DataError there, with the family's name, if
    they differ by more than rounding.
    """
    on_gpu = engine.device.type == "cuda"
    # Compiling the layers for these short rows would take longer than the whole check.
    with torch.compiler.set_stance("force_eager") if on_gpu else nullcontext():
        found = engine.forward(rows, MicroBatchLimit(len(rows)))
    if expected is None:
        return
    apart = ((found - expected).abs() * rows.response_mask).sum(dim=1) / rows.response_mask.sum(dim=1)
    allowed = tolerance(engine.execution.dtype, on_gpu)
    if not float(apart.max()) <= allowed:
        raise DataError(
            f"{family}: this trainer's log-probs differ from Transformers' by {float(apart.max()):.3g} per token on a "
            f"row of random tokens; rounding explains at most {allowed:.3g}",
            hint="training would optimise another model: use another model family, or another backend or dtype",
        )


def tolerance(dtype: torch.dtype, on_gpu: bool) -> float:
    """The largest mean difference between log-probs that rounding explains."""
    # On GPUs, matrix products in float32 round their factors to TF32, with 10 bits.
    unit = 2.0**-10 if on_gpu and dtype == torch.float32 else torch.finfo(dtype).eps
    return max(LEAST, UNITS * unit)
