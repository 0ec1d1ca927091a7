"""MFU and memory of the training engine: log-prob pass, actor update and critic update on packed rows.

    python -m benchmarks.gpu.train_step --shape 1.5B [--tokens 8192 24576] [--budgets 1 0.9] [--profile DIR]

MFU is against the matrix rate measured in the same run; repeated work does not count.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.common import (
    END_TOKEN,
    SHAPES,
    Results,
    Shape,
    arguments,
    join_alone,
    matrix_rate,
    random_model,
    seconds,
)
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.errors import WorkerError
from trainer.models.networks import PolicyNetwork, ValueNetwork
from trainer.planning.flops import Rows, forward_flops, update_flops
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.sharding import Execution


def make_batch(shape: Shape, rows: int, prompt: int, response: int, spread: float) -> Batch:
    """Random rows; with a spread, response lengths are uniform in response x [1 - spread, 1].

    None contains the padding token: its embedding is zero, so that RMSNorm multiplies the gradient at the start of a
    row by about 500 in each layer, and 28 random layers overflow.
    """
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> list[int]:
        return torch.randint(END_TOKEN + 1, shape.vocabulary, (length,), generator=generator).tolist()

    low = max(1, round(response * (1 - spread)))
    lengths = torch.randint(low, response + 1, (rows,), generator=generator).tolist()
    batch = Batch.from_responses([tokens(prompt) for _ in range(rows)], [tokens(n) for n in lengths], None)
    noise = torch.randn(batch.response_mask.shape, generator=generator).where(batch.response_mask, 0.0)
    return batch.with_(advantages=noise, returns=noise, values=noise, old_log_probs=noise)


def policy_loss(output: tuple[Tensor, Tensor], part: Batch, _count: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (-part.advantages * output[0]).sum() / part.response_mask.sum()
    return loss, {"loss": loss}


def value_loss(values: Tensor, part: Batch, _count: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (values - part.returns).square().sum() / part.response_mask.sum()
    return loss, {"loss": loss}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--roles", nargs="+", choices=["actor", "critic"], default=["actor", "critic"])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[24576], help="tokens of a micro-batch")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.9], help="activation_memory_budget")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="directory for the longest kernels of one update")
    options = parser.parse_args()
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    join_alone(options.device)
    options.rate = matrix_rate(8192 if options.device.type == "cuda" else 512)
    results = Results(options.out, "train_step")
    for role, budget, tokens in itertools.product(options.roles, options.budgets, options.tokens):
        try:
            measure(role, budget, tokens, options, results)
        except (torch.OutOfMemoryError, WorkerError) as error:
            results.add(shape=options.shape, role=role, budget=budget, micro_batch_tokens=tokens, error=str(error))
        torch.compiler.reset()  # or the next engine would run into the limit of recompilations
        if options.device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def measure(role: str, budget: float, tokens: int, options: argparse.Namespace, results: Results) -> None:
    """Adds a row for the forward pass and one for the update of a network."""
    shape, device = SHAPES[options.shape], options.device
    batch = make_batch(shape, options.rows, options.prompt, options.response, options.spread)
    lengths, responses = batch.lengths.tolist(), int(batch.response_mask.sum())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    compiled = not options.no_compile and device.type == "cuda"
    execution = Execution(device, dtype, options.checkpointing, compiled, budget)
    model = random_model(shape, device.type, torch.float32)
    network = PolicyNetwork(model, 1.0) if role == "actor" else ValueNetwork(model)
    engine, limit = TrainingEngine(network, execution, OptimizerSettings(1e-6, 0.0, 1.0)), MicroBatchLimit(1, tokens)
    loss = policy_loss if role == "actor" else value_loss
    rows = Rows(lengths, responses if role == "actor" else 0)
    phases: dict[str, tuple[float, Callable[[], Any]]] = {
        "forward": (forward_flops(shape.size, rows), lambda: engine.forward(batch, limit)),
        "update": (update_flops(shape.size, rows), lambda: engine.update(batch, loss, limit)),
    }
    for phase, (work, action) in phases.items():
        action()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = seconds(action, options.repeats)
        memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        results.add(
            shape=options.shape,
            role=role,
            phase=phase,
            tokens=sum(lengths),
            spread=options.spread,
            micro_batch_tokens=tokens,
            budget=budget,
            checkpointing=options.checkpointing,
            compiled=compiled,
            seconds=round(taken, 4),
            tokens_per_second=round(sum(lengths) / taken),
            mfu=round(work / taken / options.rate, 3),
            matrix_tflops=round(options.rate / 1e12),
            peak_gib=round(memory, 1),
        )
    if options.profile:
        profile(options.profile / f"{options.shape}-{role}.txt", phases["update"][1])


def profile(path: Path, action: Any) -> None:
    """Writes the kernels of one run, longest first."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as recorded:
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    path.write_text(recorded.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=110))


if __name__ == "__main__":
    main()
