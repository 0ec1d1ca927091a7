"""Measurements of layers and attention, run by ranks of `tests.gpu.ranks`. Each function returns figures for a test.

The yardstick is Transformers' eager attention in float32 on the same device, one row at a time.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from tests.trainer.training.megatron_program import language_model
from tests.trainer.training.rank_program import loss
from trainer.algorithms.log_probs import log_probs_and_entropy
from trainer.algorithms.losses.aggregation import GlobalCount
from trainer.config.sections.sharding import ShardingConfig
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.attention import packed_attention
from trainer.models.backend import training_backend
from trainer.models.megatron_weights import to_transformers
from trainer.models.networks import PolicyNetwork
from trainer.models.packing import PackedRows
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.micro_batches import LENGTH_MULTIPLE
from trainer.training.ranks.sharding import Execution

VOCABULARY = 64
TEMPERATURE = 0.7
SETTINGS = OptimizerSettings(learning_rate=1e-3, weight_decay=0.01, max_gradient_norm=0.5)
WHOLE = MicroBatchLimit(1000)


def batch(rows: int = 8, longest: int = 90) -> Batch:
    """Rows of very different lengths; prompt and response have up to `longest` tokens each. Some share a prompt."""
    generator = torch.Generator().manual_seed(1)

    def tokens() -> list[int]:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

    prompts = [tokens() for _ in range(rows)]
    prompts[1::4] = prompts[::4]
    made = Batch.from_responses(prompts, [tokens() for _ in range(rows)], None)
    return made.with_(advantages=torch.randn(made.response_mask.shape, generator=generator))


def exactly() -> None:
    """Turns TF32 off, the trainer's choice on GPUs, whose rounding would hide differences."""
    torch.set_float32_matmul_precision("highest")


def engine(model: nn.Module, device: torch.device, dtype: torch.dtype, **execution: Any) -> TrainingEngine:
    made = TrainingEngine(PolicyNetwork(model, TEMPERATURE), Execution(device, dtype, **execution), SETTINGS)
    exactly()
    return made


def row_by_row(model: nn.Module, rows: Batch, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs, [rows, response length] on CPU, and the gradients of their loss, without packing or padding."""
    exactly()
    model = model.to(device)
    model.set_attn_implementation("eager")
    outputs = torch.zeros(2, *rows.response_mask.shape, device=device)
    for row in range(len(rows)):
        prompt, length = int(rows.prompt_lengths[row]), int(rows.lengths[row])
        ids = rows.token_ids[row : row + 1, :length].to(device)
        results = log_probs_and_entropy(model(ids).logits[0, prompt - 1 : -1], ids[0, prompt:], TEMPERATURE)
        outputs[:, row, : length - prompt] = torch.stack(results)
    return outputs[0].detach().cpu(), gradients_of_loss(model, (outputs[0], outputs[1]), rows)


def gradients_of_loss(model: nn.Module, outputs: tuple[Tensor, Tensor], rows: Batch) -> dict[str, Tensor]:
    mask = rows.response_mask
    value, _ = loss(outputs, rows.to(outputs[0].device), GlobalCount(int(mask.sum()), len(rows)))
    model.zero_grad()
    value.backward()
    return {name: weight.grad.float().cpu() for name, weight in model.named_parameters()}


def gradients(engine: TrainingEngine, rows: Batch, limit: MicroBatchLimit) -> dict[str, Tensor]:
    """The engine's whole gradients by Transformers' names, without the loss scale."""
    engine.accumulate_gradients(rows, loss, limit)
    results = {
        name: part.cpu().clone() / engine.loss_scale.value
        for inner_name, weight in engine.network.language_model.named_parameters()
        for name, part in to_transformers(inner_name, weight.grad.full_tensor(), engine.origins)
    }
    engine.optimizer.zero_grad()
    return results


def apart(
    results: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]], mask: Tensor
) -> dict[str, float]:
    """Distances of log-probs and gradients from the expected ones; a gradient's is relative to its norm."""
    difference = (results[0] - wanted[0])[mask].abs()
    assert results[1].keys() == wanted[1].keys()
    values, expected = (torch.cat([part[name].flatten() for name in wanted[1]]) for part in (results[1], wanted[1]))
    return {
        "log_probs": float(difference.max()),
        "log_probs, mean": float(difference.mean()),
        "gradient": float((values - expected).norm() / expected.norm()),
        "gradient of a weight": max(
            float((results[1][name] - gradient).norm() / gradient.norm()) for name, gradient in wanted[1].items()
        ),
        "gradient, cosine": float(cosine_similarity(values, expected, dim=0)),
    }


def backends(device: torch.device, family: str, dtype: str, backend: str, split: int = 1) -> dict[str, float]:
    """A backend's layers, and Transformers' in the same type, both compared with Transformers' in float32."""
    world, rank = dist.get_world_size(), dist.get_rank()
    everything = batch()
    share = len(everything) // world
    rows = everything.rows(torch.arange(rank * share, (rank + 1) * share))

    def computed(dtype: str, **execution: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Log-probs of the rows of this rank, although its data group may have more."""
        made = engine(language_model(family), device, getattr(torch, dtype), **execution)
        assert (made.split_ranks is None) == (execution.get("backend") != training_backend("megatron"))
        first, size = rank - rank % made.ranks_per_data_group, made.ranks_per_data_group
        of_group = everything.rows(torch.arange(first * share, (first + size) * share))
        log_probs = made.forward(of_group, MicroBatchLimit(3))[(rank - first) * share :][:share]
        return log_probs, gradients(made, of_group, MicroBatchLimit(3))

    wanted = computed("float32")
    split_rows = computed(dtype, backend=training_backend(backend), sharding=ShardingConfig(tensor_parallel=split))
    results = apart(split_rows, wanted, rows.response_mask)
    if dtype != "float32":
        plain = apart(computed(dtype), wanted, rows.response_mask)
        results |= {f"Transformers' {name}": value for name, value in plain.items()}
    return results


def packed_network(device: torch.device, family: str, dtype: str, share_prompts: bool) -> dict[str, float]:
    """A packed line, padded as on GPUs, compared with its rows one by one in float32."""
    rows = batch()
    wanted = row_by_row(language_model(family), rows, device)
    model = language_model(family).to(device, getattr(torch, dtype))
    outputs = PolicyNetwork(model, TEMPERATURE)(PackedRows.of(rows, 256, share_prompts).to(device))
    results = outputs[0].detach().cpu(), gradients_of_loss(model, outputs, rows)
    return apart(results, wanted, rows.response_mask)


def attention(
    device: torch.device,
    dtype: str,
    window: int | None,
    width: int,
    value_width: int | None = None,
    sinks: bool = False,
) -> dict[str, float]:
    """Attention of a packed line compared with padded attention in float32, and the share that the window hides.

    Values have a width of their own (DeepSeek's latent attention), and heads have sinks (gpt-oss), if given.
    """
    lengths = [1, 300, 17, 64, 130]
    drawn = drawn_for(lengths, (4, 2), width, 2, device, dtype)
    if value_width is not None:
        drawn[2:] = (tensor[..., :value_width] for tensor in drawn[2:])
    if sinks:
        drawn.append(torch.tensor([-1.0, 0.0, 1.0, 3.0], device=device))
    names = ("output", "query", "key", "value", "sinks")[: len(drawn)]
    results, wanted = (attended(drawn, lengths, kind, window) for kind in (dtype, "float32"))
    open_to_all = attended(drawn, lengths, "float32", None)[0]
    differences = {name: distance(*pair) for name, *pair in zip(names, results, wanted, strict=True)}
    return differences | {"hidden by the window": distance(open_to_all, wanted[0])}


def attention_of_long_rows(device: torch.device, dtype: str, seed: int) -> dict[str, float]:
    """The largest difference in any row of a line as GRPO packs it: long prompts, lengths that fall geometrically."""
    generator = torch.Generator().manual_seed(seed)
    longest, room = (2048, 16384) if device.type == "cuda" else (128, 1024)
    drawn_lengths = torch.empty(room).exponential_(4 / longest, generator=generator).long().clamp(1, longest)
    ends = (drawn_lengths + longest // 4).cumsum(0)
    lengths = (drawn_lengths + longest // 4)[ends <= room].tolist()
    lengths.append(-sum(lengths) % LENGTH_MULTIPLE or LENGTH_MULTIPLE)  # the unused row that fills the line
    drawn = drawn_for(lengths, (12, 2), 128, seed, device, dtype)
    results, wanted = (attended(drawn, lengths, kind, None) for kind in (dtype, "float32"))
    return {
        name: max(map(distance, values.split(lengths), expected.split(lengths)))
        for name, values, expected in zip(("output", "query", "key", "value"), results, wanted, strict=True)
    }


def drawn_for(
    lengths: list[int], heads: tuple[int, int], width: int, seed: int, device: torch.device, dtype: str
) -> list[Tensor]:
    """Query, key, value and the output's gradient, exact in both types, so that only the kernels differ."""
    exactly()
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, number, sum(lengths), width) for number in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)).float().to(device) for shape in shapes]


def attended(drawn: list[Tensor], lengths: list[int], dtype: str, window: int | None) -> list[Tensor]:
    """The output and the gradients of query, key and value, each [tokens, heads, width] float32, and of sinks."""
    offsets = torch.tensor([0, *lengths], device=drawn[0].device).cumsum(0).to(torch.int32)
    query, key, value, *sinks = (
        tensor.to(getattr(torch, dtype), copy=True).requires_grad_() for tensor in (*drawn[:3], *drawn[4:])
    )
    longest = -(-max(lengths) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    output, _ = packed_attention(
        *(nn.Module(), query, key, value, None, None, window),
        s_aux=sinks[0] if sinks else None,
        **{"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest},
    )
    output.backward(drawn[3].transpose(1, 2).to(output.dtype))
    gradients = (tensor.grad.squeeze(0).transpose(0, 1).float() for tensor in (query, key, value))
    return [output.detach().squeeze(0).float(), *gradients, *(tensor.grad.float() for tensor in sinks)]


def distance(values: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to that of the expected values; infinite if a number is not finite."""
    ratio = float((values - expected).norm() / expected.norm())
    return ratio if math.isfinite(ratio) else math.inf
