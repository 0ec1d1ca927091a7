"""Measurements of layers and attention, run by ranks of `tests.gpu.ranks`. Each function returns figures for a test.

The yardstick is Transformers' eager attention in float32 on the same device, one row at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from tests.trainer.training.megatron_program import language_model
from tests.trainer.training.rank_program import loss
from trainer.algorithms.aggregation import GlobalCount
from trainer.algorithms.log_probs import log_probs_and_entropy
from trainer.config.sharding import ShardingConfig
from trainer.data.batch import Batch
from trainer.data.partition import MicroBatchLimit
from trainer.models.attention import packed_attention
from trainer.models.backend import training_backend
from trainer.models.megatron_weights import to_transformers
from trainer.models.networks import PolicyNetwork
from trainer.models.packing import PackedRows
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.sharding import Execution

VOCABULARY = 64
TEMPERATURE = 0.7
SETTINGS = OptimizerSettings(learning_rate=1e-3, weight_decay=0.01, max_gradient_norm=0.5)
WHOLE = MicroBatchLimit(1000)


def batch(rows: int = 8, longest: int = 90) -> Batch:
    """Rows of very different lengths; prompt and response have up to `longest` tokens each."""
    generator = torch.Generator().manual_seed(1)

    def tokens() -> list[int]:
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

    made = Batch.from_responses([tokens() for _ in range(rows)], [tokens() for _ in range(rows)], None)
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
        found = log_probs_and_entropy(model(ids).logits[0, prompt - 1 : -1], ids[0, prompt:], TEMPERATURE)
        outputs[:, row, : length - prompt] = torch.stack(found)
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
    found = {
        name: part.cpu().clone() / engine.loss_scale.value
        for own, weight in engine.network.language_model.named_parameters()
        for name, part in to_transformers(own, weight.grad.full_tensor(), engine.origins)
    }
    engine.optimizer.zero_grad()
    return found


def apart(
    found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]], mask: Tensor
) -> dict[str, float]:
    """Distances of log-probs and gradients from the expected ones; a gradient's is relative to its norm."""
    difference = (found[0] - wanted[0])[mask].abs()
    assert found[1].keys() == wanted[1].keys()
    one, other = (torch.cat([gradients[name].flatten() for name in wanted[1]]) for gradients in (found[1], wanted[1]))
    return {
        "log_probs": float(difference.max()),
        "log_probs, mean": float(difference.mean()),
        "gradient": float((one - other).norm() / other.norm()),
        "gradient of a weight": max(
            float((found[1][name] - gradient).norm() / gradient.norm()) for name, gradient in wanted[1].items()
        ),
        "gradient, cosine": float(cosine_similarity(one, other, dim=0)),
    }


def backends(device: torch.device, family: str, dtype: str, backend: str, split: int = 1) -> dict[str, float]:
    """A backend's layers, and Transformers' in the same type, both compared with Transformers' in float32."""
    world, rank = dist.get_world_size(), dist.get_rank()
    everything = batch()
    share = len(everything) // world
    rows = everything.rows(torch.arange(rank * share, (rank + 1) * share))

    def computed(dtype: str, **execution: Any) -> tuple[Tensor, dict[str, Tensor]]:
        made = engine(language_model(family), device, getattr(torch, dtype), **execution)
        assert (made.split_ranks is None) == (execution.get("backend") != training_backend("megatron"))
        return made.forward(rows, MicroBatchLimit(3)), gradients(made, rows, MicroBatchLimit(3))

    wanted = computed("float32")
    own = computed(dtype, backend=training_backend(backend), sharding=ShardingConfig(tensor_parallel=split))
    found = apart(own, wanted, rows.response_mask)
    if dtype != "float32":
        plain = apart(computed(dtype), wanted, rows.response_mask)
        found |= {f"Transformers' {name}": value for name, value in plain.items()}
    return found


def packed_network(device: torch.device, family: str, dtype: str) -> dict[str, float]:
    """A packed line, padded as on GPUs, compared with its rows one by one in float32."""
    rows = batch()
    wanted = row_by_row(language_model(family), rows, device)
    model = language_model(family).to(device, getattr(torch, dtype))
    outputs = PolicyNetwork(model, TEMPERATURE)(PackedRows.of(rows, 256).to(device))
    found = outputs[0].detach().cpu(), gradients_of_loss(model, outputs, rows)
    return apart(found, wanted, rows.response_mask)


def attention(device: torch.device, dtype: str, window: int | None, width: int) -> dict[str, float]:
    """Attention of a packed line compared with padded attention in float32, and the share that the window hides."""
    exactly()
    lengths = [1, 300, 17, 64, 130]
    generator = torch.Generator().manual_seed(2)
    shapes = [(1, heads, sum(lengths), width) for heads in (4, 2, 2, 4)]
    drawn = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

    def attended(dtype: torch.dtype, window: int | None) -> Iterator[Tensor]:
        query, key, value = (tensor.to(dtype, copy=True).requires_grad_() for tensor in drawn[:3])
        output, _ = packed_attention(
            nn.Module(), query, key, value, None, None, window, cu_seq_lens_q=offsets, max_length_q=512
        )
        output.backward(drawn[3].transpose(1, 2).to(dtype))
        yield from (output.detach().float(), query.grad.float(), key.grad.float(), value.grad.float())

    # Inputs are exact in both types, so that only the kernels differ.
    drawn = [tensor.to(getattr(torch, dtype)).float() for tensor in drawn]
    names = ("output", "query", "key", "value")
    wanted, open_to_all = list(attended(torch.float32, window)), next(attended(torch.float32, None))
    pairs = zip(names, attended(getattr(torch, dtype), window), wanted, strict=True)
    found = {name: float((one - other).norm() / other.norm()) for name, one, other in pairs}
    return found | {"hidden by the window": float((open_to_all - wanted[0]).norm() / wanted[0].norm())}
