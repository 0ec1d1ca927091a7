"""Compares a network's own log-probs, or a critic's values, with plain Transformers' before the first step.

A run that computes other numbers than the model defines learns something else without a sign of it. The yardstick is
computed on CPU with the weights as loaded, on padded rows, so that the comparison covers packing, attention, the head,
shared prompts, precision, sharding, split matrices and the training backend. Weights that stay in their files are read
one at a time.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from trainer.algorithms.log_probs import log_probs_and_entropy
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.errors import DataError
from trainer.training.engine import TrainingEngine

# Prompt and response lengths of the rows. They differ, so that a row that reads another one shows. The last row has the
# prompt of the one before.
PROMPTS, RESPONSES = (5, 3), (8, 14, 6)
# Rounding changes log-probs by fewer units in the last place, on average over a row. Measured: 6 with Qwen2's shape of
# 7B in bfloat16, 6 with Mamba; a forgotten scale, bias or state makes hundreds.
UNITS = 32
# The smallest difference that counts, for networks in float32.
LEAST = 1e-3


def check_rows(vocabulary: int) -> Batch:
    """Rows of different lengths, two of which share a prompt; their tokens are the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def tokens(lengths: tuple[int, ...]) -> list[list[int]]:
        return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]

    prompts = tokens(PROMPTS)
    return Batch.from_responses([*prompts, prompts[-1]], tokens(RESPONSES), None)


def transformers_log_probs(language_model: nn.Module, rows: Batch, temperature: float) -> Tensor:
    """Log-probs by Transformers' own forward pass, [rows, response length] float32."""

    def log_probs(ids: Tensor) -> Tensor:
        logits = language_model(input_ids=ids[:, :-1], use_cache=False).logits
        return log_probs_and_entropy(logits, ids[:, 1:], temperature)[0]

    return _of_responses(language_model, rows, log_probs)


def transformers_values(language_model: nn.Module, head: Tensor, rows: Batch) -> Tensor:
    """The values of a head, [1, width], on the states of Transformers' own decoder, [rows, response length] float32."""

    def values(ids: Tensor) -> Tensor:
        states = language_model.get_decoder()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        return nn.functional.linear(states.float(), head.float()).squeeze(-1)

    return _of_responses(language_model, rows, values)


@torch.no_grad()
def _of_responses(language_model: nn.Module, rows: Batch, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """What `compute` finds for each response token, given the ids of all rows, [rows, tokens], of which the first
    needs nothing: no token of a causal model depends on the padding after it.

    Uses eager attention, because Transformers' faster ones ignore soft caps, and eager experts, which read only those
    that are chosen.
    """
    attention, experts = language_model.config._attn_implementation, language_model.config._experts_implementation
    language_model.eval().set_attn_implementation("eager")
    if has_experts := language_model._can_set_experts_implementation():
        language_model.set_experts_implementation("eager")
    computed = compute(rows.token_ids)
    language_model.set_attn_implementation(attention)
    if has_experts:
        language_model.set_experts_implementation(experts)
    values = torch.zeros(rows.response_mask.shape)
    for row in range(len(rows)):
        prompt, length = int(rows.prompt_lengths[row]), int(rows.lengths[row])
        values[row, : length - prompt] = computed[row, prompt - 1 : length - 1]
    return values


def check_head(width: int) -> Tensor:
    """A value head with which the critic is compared, [1, width]; the same in every run."""
    return torch.randn(1, width, generator=torch.Generator().manual_seed(0)) / width**0.5


def check_log_probs(engine: TrainingEngine, rows: Batch, expected: Tensor | None, family: str) -> None:
    """Compares the engine's log-probs of the rows with the expected ones.

    Every rank must call it; `expected` is None on all but the first. Raises DataError there, with the family's name, if
    they differ by more than rounding.
    """
    _check(engine, rows, expected, f"{family}: this trainer's log-probs differ", 1.0)


def check_values(engine: TrainingEngine, rows: Batch, expected: Tensor | None, family: str) -> None:
    """Compares a critic's values, which may have any scale, like `check_log_probs`."""
    scale = 1.0 if expected is None else max(1.0, float(expected[rows.response_mask].square().mean().sqrt()))
    _check(engine, rows, expected, f"{family}: the critic's values differ", scale)


def _check(engine: TrainingEngine, rows: Batch, expected: Tensor | None, subject: str, scale: float) -> None:
    on_gpu = engine.device.type == "cuda"
    # Compiling the layers for these short rows would take longer than the whole check.
    with torch.compiler.set_stance("force_eager") if on_gpu else nullcontext():
        computed = engine.forward(rows, MicroBatchLimit(len(rows)))
    if expected is None:
        return
    apart = ((computed - expected).abs() * rows.response_mask).sum(dim=1) / rows.response_mask.sum(dim=1)
    allowed = scale * tolerance(engine.execution.dtype, on_gpu)
    if not float(apart.max()) <= allowed:
        raise DataError(
            f"{subject} from Transformers' by {float(apart.max()):.3g} per token on a row of random tokens; "
            f"rounding explains at most {allowed:.3g}",
            hint="training would optimise another model: use another model family, or another backend or dtype",
        )


def tolerance(dtype: torch.dtype, on_gpu: bool) -> float:
    """The largest mean difference that rounding explains, between numbers of the order of 1."""
    # On GPUs, matrix products in float32 round their factors to TF32, with 10 bits.
    unit = 2.0**-10 if on_gpu and dtype == torch.float32 else torch.finfo(dtype).eps
    return max(LEAST, UNITS * unit)
