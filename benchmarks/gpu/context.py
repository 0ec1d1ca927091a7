"""One long row whose tokens several ranks compute together (context parallelism), measured as one of these ranks.

    python -m benchmarks.gpu.context --shape 7B --tokens 65536 --parallel 1 2 4 [--checkpointing false true]

Forward pass, loss and backward pass of the training engine on one GPU, which has the work of one of P ranks: its share
of the tokens, and in attention its share of the heads. Local copies of the same bytes replace the collectives;
`exchanged_gib` is what such a rank would send in a step. Weights and gradients are whole and in bfloat16, without an
optimizer. If memory is full, half the row is tried next. MFU is against the matrix rate measured in the same run.
"""

import argparse
import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.common import (
    SHAPES,
    OneOfSeveral,
    Results,
    arguments,
    join_alone,
    matrix_rate,
    random_model,
    seconds,
)
from benchmarks.gpu.train_step import make_batch, policy_loss
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.errors import DataError
from trainer.models.context_parallel import ContextGroup
from trainer.models.networks import PolicyNetwork, check_context_parallel
from trainer.planning.flops import Rows, update_flops
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.memory.allocator import use_expandable_segments
from trainer.training.ranks.sharding import Execution

LEAST_TOKENS = 64  # of a row


class LocalCopies(OneOfSeveral, ContextGroup):
    """One of several members, which receives copies of what it sends itself. `sent` counts the bytes."""

    def exchange(self, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        self.sent += parts.nbytes * (self.members - 1) // self.members
        return torch.empty_like(parts).copy_(parts)

    def add_up(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--tokens", type=int, default=65536, help="of the row; a sixteenth is its prompt")
    parser.add_argument("--parallel", type=int, nargs="+", default=[1, 2, 4], help="ranks that compute the row")
    parser.add_argument("--checkpointing", nargs="+", choices=["false", "true"], default=["false", "true"])
    parser.add_argument("--budget", type=float, default=0.9, help="activation_memory_budget")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use_expandable_segments(options.device)
    join_alone(options.device)
    options.rate = matrix_rate(8192 if options.device.type == "cuda" else 512)
    results = Results(options.out, "context")
    for checkpointing in options.checkpointing:
        engine = build(options, checkpointing == "true")
        for ranks in options.parallel:
            known = {
                "shape": options.shape,
                "context_parallel": ranks,
                "checkpointing": checkpointing == "true",
                "compiled": engine.compiles,
                "budget": options.budget,
            }
            try:
                check_context_parallel(engine.network.language_model, "actor", ranks)
            except DataError as error:
                results.add(**known, error=str(error), hint=error.hint)
                continue
            measure_largest(engine, ranks, options, results, known)
            torch.compiler.reset()  # or the next number of ranks would run into the limit of recompilations
        del engine
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def build(options: argparse.Namespace, checkpointing: bool) -> TrainingEngine:
    on_gpu = options.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    execution = Execution(options.device, dtype, checkpointing, not options.no_compile and on_gpu, options.budget)
    network = PolicyNetwork(random_model(SHAPES[options.shape], options.device.type, dtype), 1.0)
    return TrainingEngine(network, execution, OptimizerSettings(1e-6, 0.0, 1.0))


def measure_largest(
    engine: TrainingEngine, ranks: int, options: argparse.Namespace, results: Results, known: dict[str, Any]
) -> None:
    """Adds a row for the whole row of tokens or, after one for each that has no room, for the largest that has."""
    tokens = options.tokens
    while tokens >= LEAST_TOKENS:
        try:
            measure(engine, ranks, tokens, options, results, known)
        except torch.OutOfMemoryError as error:
            results.add(**known, tokens=tokens, error=str(error).split(". ")[0])
        else:
            return
        # The error's traceback held the tensors of the pass until here.
        engine.discard_pass()
        tokens //= 2


def measure(
    engine: TrainingEngine,
    ranks: int,
    tokens: int,
    options: argparse.Namespace,
    results: Results,
    known: dict[str, Any],
) -> None:
    shape, on_gpu = SHAPES[options.shape], options.device.type == "cuda"
    prompt = tokens // 16
    batch, limit = make_batch(shape, 1, prompt, tokens - prompt, 0.0), MicroBatchLimit(1)
    context = LocalCopies(ranks) if ranks > 1 else None
    engine.network.context = context

    def step(batch: Batch = batch) -> None:
        if context is not None:
            context.sent = 0
        engine.accumulate_gradients(batch, policy_loss, limit)
        engine.optimizer.zero_grad()

    held = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    taken = seconds(step, options.repeats)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    work = update_flops(shape.size, Rows([tokens], tokens - prompt)) / ranks
    results.add(
        **known,
        tokens=tokens,
        seconds=round(taken, 3),
        tokens_per_second_per_rank=round(tokens / ranks / taken),
        mfu=round(work / taken / options.rate, 3),
        matrix_tflops=round(options.rate / 1e12),
        peak_gib=round(peak / 2**30, 1),
        weights_gib=round(held / 2**30, 1),
        exchanged_gib=0.0 if context is None else round(context.sent / 2**30, 2),
    )


if __name__ == "__main__":
    main()
