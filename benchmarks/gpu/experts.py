"""A mixture of experts, measured as one of the ranks that divide its experts (expert parallelism).

    python -m benchmarks.gpu.experts --shape moe-30B --layers 6 --parallel 1 2 8 [--optimizer] [--parts DIR]

Updates of the training engine on one GPU, which has the work of one of X ranks: a part of the layers, the X-th part of
their experts, and the tokens that X ranks with the same rows send to these. Local copies of as many bytes replace the
exchange of tokens; gathering weights and averaging gradients is not measured. Weights are in float32, computation in
bfloat16. Choices are drawn so that some experts are popular: `load` is the most tokens of an expert, as a multiple of
the mean. TFLOP/s count the parameters that a token uses (`trainer.planning.flops`), MFU is against the matrix rate
measured in the same run, `planned_gib` is what `trainer plan` reckons. With fewer layers than the whole model, fewer
tokens are responses, so that the output head weighs as in the whole. If memory is full, half the layers are tried next.

With `--parts` each part of a layer is measured alone, and DIR gets the longest kernels of an update.
"""

import argparse
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.gpu.common import (
    SHAPES,
    MixtureShape,
    OneOfSeveral,
    Results,
    arguments,
    join_alone,
    matrix_rate,
    random_model,
    seconds,
)
from benchmarks.gpu.train_step import make_batch, policy_loss, profile
from trainer.config.sections.roles import ActorConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.experts import ExpertGroup, expert_modules
from trainer.models.networks import PolicyNetwork
from trainer.planning.activations import pass_bytes
from trainer.planning.flops import Rows, update_flops
from trainer.planning.model_size import ModelSize
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.memory.allocator import use_expandable_segments
from trainer.training.ranks.sharding import EXPERT, EXPERT_SHARD, Execution, reshard, sharded_modules

MIXTURES = [name for name, shape in SHAPES.items() if isinstance(shape, MixtureShape)]
# Every so many experts have all degrees of popularity, so that ranks are loaded alike for every X that leaves them.
DEGREES = 16


class LocalCopies(OneOfSeveral, ExpertGroup):
    """One of several members with the same tokens, which receives copies of rows that it has. `sent` counts bytes."""

    def loads(self, counts: Tensor) -> Tensor:
        return counts.cpu().view(1, self.members, -1).repeat(self.members, 1, 1)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        count, rows = sum(received), rows.contiguous()
        self.sent += sum(sent[1:]) * rows.shape[1] * rows.element_size()
        if not len(rows):
            return rows.new_zeros(count, *rows.shape[1:])
        return rows.repeat(math.ceil(count / len(rows)), 1)[:count].contiguous()


class SkewedRouter(nn.Module):  # type: ignore[misc]
    """Qwen3's router whose choices are drawn, experts of a higher `bias` more often.

    A random model's own choices are nearly the same for all tokens. Weights of the choices come from the logits.
    """

    def __init__(self, router: Any, experts: int, skew: float) -> None:
        super().__init__()
        device = router.weight.device
        self.top_k = router.top_k
        self.weight = nn.Parameter(torch.randn(experts, router.weight.shape[1], device=device) * 0.02)
        popularity = torch.linspace(-1.0, 1.0, DEGREES, device=device) * skew
        self.register_buffer("bias", popularity.repeat(experts // DEGREES))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, weights and indices of the chosen experts, [tokens, experts] and twice [tokens, chosen]."""
        logits = nn.functional.linear(hidden, self.weight)
        # Gumbel noise: the largest are a draw without replacement from the softmax of the bias.
        drawn = self.bias - (-torch.rand_like(logits, dtype=torch.float32).clamp_min(1e-20).log()).log()
        index = drawn.topk(self.top_k, dim=-1).indices
        weights = logits.float().softmax(dim=-1).gather(-1, index)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), index


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=MIXTURES, default="moe-30B")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--parallel", type=int, nargs="+", default=[1, 2, 8], help="ranks that divide the experts")
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--row", type=int, default=2048, help="tokens of a row; in the whole model half are response")
    parser.add_argument("--micro-batches", type=int, default=2, help="of an update, each of all rows")
    parser.add_argument("--skew", type=float, default=1.0, help="0: every expert is equally popular")
    parser.add_argument("--checkpointing", nargs="+", choices=["false", "true"], default=["false"])
    parser.add_argument("--compiled", nargs="+", choices=["false", "true"], default=["true"])
    parser.add_argument("--optimizer", action="store_true", help="with AdamW's step and its states")
    parser.add_argument("--budget", type=float, default=0.9, help="activation_memory_budget")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", type=Path, help="measure parts; a directory for the longest kernels of an update")
    options = parser.parse_args()
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use_expandable_segments(options.device)
    join_alone(options.device)
    options.rate = matrix_rate(8192 if options.device.type == "cuda" else 512)
    results = Results(options.out, "experts")
    for ranks in options.parallel:
        for compiled in options.compiled if options.device.type == "cuda" else ["false"]:
            for checkpointing in options.checkpointing:
                measure_most_layers(ranks, compiled == "true", checkpointing == "true", options, results)
                torch.compiler.reset()  # or the next engine would run into the limit of recompilations
    dist.destroy_process_group()


def measure_most_layers(
    ranks: int, compiled: bool, checkpointing: bool, options: argparse.Namespace, results: Results
) -> None:
    """Adds a row for all layers or, after one for each number that has no room, for the most that have."""
    layers = options.layers
    while layers:
        known = {
            "shape": options.shape,
            "layers": layers,
            "expert_parallel": ranks,
            "micro_batch_tokens": options.rows * options.row,
            "micro_batches": options.micro_batches,
            "compiled": compiled,
            "checkpointing": checkpointing,
            "optimizer": options.optimizer,
            "budget": options.budget,
        }
        try:
            measure(ranks, layers, compiled, checkpointing, options, results, known)
        except torch.OutOfMemoryError as error:
            results.add(**known, error=str(error).split(". ")[0])
        except (TorchDynamoException, RuntimeError) as error:  # compilers raise either; other rows are worth having
            results.add(**known, error=f"{type(error).__name__}: {str(error)[:300]}")
            return
        else:
            return
        finally:
            gc.collect()
            if options.device.type == "cuda":
                torch.cuda.empty_cache()
        layers //= 2


def measure(
    ranks: int,
    layers: int,
    compiled: bool,
    checkpointing: bool,
    options: argparse.Namespace,
    results: Results,
    known: dict[str, Any],
) -> None:
    whole, on_gpu = SHAPES[options.shape], options.device.type == "cuda"
    assert isinstance(whole, MixtureShape)
    whole = replace(whole, layers=layers)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = model_of_rank(whole, ranks, options)
    held = ModelSize.of_mixture(model)
    assert held is not None
    execution = Execution(options.device, dtype, checkpointing, compiled, options.budget)
    # A rank that has its experts to itself.
    alone = init_device_mesh(options.device.type, (1, 1), mesh_dim_names=(EXPERT_SHARD, EXPERT)) if ranks > 1 else None
    with patch("trainer.training.ranks.sharding.expert_mesh", return_value=alone):
        engine = TrainingEngine(PolicyNetwork(model, 1.0), execution, OptimizerSettings(1e-6, 0.0, 1.0))
    group = LocalCopies(ranks)
    for experts in expert_modules(engine.network):
        experts.expert_group, experts.num_experts = group, whole.experts
    rows, limit = options.rows * options.micro_batches, MicroBatchLimit(options.rows)
    response = max(1, options.row * layers // (2 * SHAPES[options.shape].layers))
    batch = make_batch(whole, rows, options.row - response, response, 0.0)

    def update() -> None:
        group.sent = 0
        if options.optimizer:
            engine.update(batch, policy_loss, limit)
            return
        engine.accumulate_gradients(batch, policy_loss, limit)
        engine.optimizer.zero_grad()

    load = load_of(engine, batch)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    taken = seconds(update, options.repeats)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    work = update_flops(whole.size, Rows(batch.lengths.tolist(), int(batch.response_mask.sum())))
    results.add(
        **known,
        load=[round(share, 2) for share in load],
        seconds=round(taken, 4),
        tokens_per_second=round(rows * options.row / taken),
        tflops=round(work / taken / 1e12, 1),
        mfu=round(work / taken / options.rate, 3),
        matrix_tflops=round(options.rate / 1e12),
        exchanged_gib=round(group.sent / 2**30, 2),
        parameters=held.parameters,
        peak_gib=round(peak / 2**30, 1),
        planned_gib=round(planned_bytes(held, checkpointing, options) / 2**30, 1),
    )
    if options.parts:
        profile(options.parts / f"{options.shape}-{ranks}-{'compiled' if compiled else 'eager'}.txt", update)
        results.add(**known, **milliseconds_of_parts(engine, batch, options))


def model_of_rank(whole: MixtureShape, ranks: int, options: argparse.Namespace) -> Any:
    """A random model with the experts that one of `ranks` ranks holds, and routers over all of them."""
    held = whole.experts // ranks
    if whole.experts % ranks or held % DEGREES:
        raise SystemExit(f"--parallel {ranks}: {whole.experts} / {ranks} experts are not no multiple of {DEGREES}")
    model = random_model(replace(whole, experts=held), options.device.type, torch.float32)
    torch.manual_seed(1)
    for layer in model.model.layers:
        layer.mlp.gate = SkewedRouter(layer.mlp.gate, whole.experts, options.skew)
    return model


def load_of(engine: TrainingEngine, batch: Batch) -> list[float]:
    """The tokens of the most popular expert of each layer in a row, as a multiple of the mean."""
    loads = []

    def count(router: SkewedRouter, _arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        tokens = output[2].flatten().bincount(minlength=len(router.bias)).float()
        loads.append((tokens.max() / tokens.mean()).item())

    routers = [module for module in engine.network.modules() if isinstance(module, SkewedRouter)]
    hooks = [router.register_forward_hook(count) for router in routers]
    with torch.compiler.set_stance("force_eager"):
        engine.forward(batch.rows(slice(1)), MicroBatchLimit(1))
    for hook in hooks:
        hook.remove()
    return loads


def planned_bytes(size: ModelSize, checkpointing: bool, options: argparse.Namespace) -> float:
    """What planning reckons for weights, gradients and AdamW's states in float32, and for a pass in bfloat16."""
    settings = ActorConfig(activation_checkpointing=checkpointing, activation_memory_budget=options.budget)
    numbers = 4 if options.optimizer else 2
    return 4 * numbers * size.parameters + pass_bytes(size, settings, 2, 1, options.rows * options.row)


def milliseconds_of_parts(engine: TrainingEngine, batch: Batch, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of the forward and backward passes of each part of a layer alone, on random hidden states of a
    micro-batch, not compiled. `experts` contain `products` and, where ranks divide them, two exchanges, here each a
    `copy`."""
    layer, tokens = engine.network.decoder.layers[0], options.rows * options.row
    attention, router, experts = layer.self_attn, layer.mlp.gate, layer.mlp.experts
    given = arguments_of(attention, engine, batch.rows(slice(options.rows)))
    units = sharded_modules(layer)
    for unit in units:
        unit.unshard()
    width = router.weight.shape[1]
    hidden = torch.randn(tokens, width, device=options.device, dtype=engine.execution.dtype)
    with torch.no_grad():
        _, weights, index = router(hidden)
    # Copies, because FSDP frees its own after a backward pass.
    gate_up, down = (
        (weight.to_local() if isinstance(weight, DTensor) else weight).detach().clone().requires_grad_()
        for weight in (experts.gate_up_proj, experts.down_proj)
    )
    # The tokens of the rank's own experts, from all ranks.
    group: LocalCopies = experts.expert_group
    counts = index.flatten().bincount(minlength=experts.num_experts)[: len(gate_up)] * group.size
    copies = hidden.repeat_interleave(index.shape[1], 0)
    received = group.exchange(copies, [len(copies)], [int(counts.sum())])
    offsets = counts.cumsum(0).to(torch.int32)

    def products(rows: Tensor) -> Tensor:
        both = nn.functional.grouped_mm(rows, gate_up.transpose(1, 2), offs=offsets)
        return nn.functional.grouped_mm(experts._apply_gate(both), down.transpose(1, 2), offs=offsets)

    parts: dict[str, tuple[Tensor, Callable[[Tensor], Tensor], list[Tensor]]] = {
        "attention": (
            hidden.unsqueeze(0),
            lambda rows: attention(hidden_states=rows, **given)[0],
            list(attention.parameters()),
        ),
        "router": (hidden, lambda rows: router(rows)[1], list(router.parameters())),
        "experts": (hidden, lambda rows: experts(rows, index, weights), list(experts.parameters())),
        "products": (received, products, [gate_up, down]),
        "copy": (copies, Tensor.clone, []),
    }
    measured = {}
    for name, (rows, compute, trained) in parts.items():
        inputs = [rows.detach().requires_grad_(), *trained]

        def both_passes(inputs: list[Tensor] = inputs, compute: Callable[[Tensor], Tensor] = compute) -> None:
            output = compute(inputs[0])
            torch.autograd.grad(output, inputs, torch.ones_like(output), allow_unused=True)

        measured[f"{name}_ms"] = round(1000 * seconds(both_passes, options.repeats), 3)
    reshard(units)
    return measured


def arguments_of(attention: nn.Module, engine: TrainingEngine, batch: Batch) -> dict[str, Any]:
    """What attention gets beside hidden states in a pass of a micro-batch."""
    kept: dict[str, Any] = {}
    hook = attention.register_forward_pre_hook(lambda _, __, given: kept.update(given), with_kwargs=True)
    with torch.compiler.set_stance("force_eager"):
        engine.forward(batch, MicroBatchLimit(len(batch)))
    hook.remove()
    return {name: value for name, value in kept.items() if name != "hidden_states"}


if __name__ == "__main__":
    main()
