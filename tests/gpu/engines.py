"""Measurements of a training engine, run by ranks of `tests.gpu.ranks`. Each function returns figures for a test."""

import gc
from typing import Any

import torch
import torch._dynamo.utils
from transformers import AutoConfig, AutoModelForCausalLM

from tests.gpu.layers import SETTINGS, TEMPERATURE, VOCABULARY, WHOLE, apart, batch, engine, gradients, row_by_row
from tests.trainer.training.megatron_program import language_model
from tests.trainer.training.rank_program import held_bytes, loss
from trainer.config.sections.sharding import ShardingConfig
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.networks import PolicyNetwork
from trainer.training.engine import TrainingEngine, optimizer_states
from trainer.training.ranks.sharding import Execution

FAMILY = "Qwen2 and 2.5"
OFFLOADS = {"param_offload": True, "optimizer_offload": True}


def micro_batches(device: torch.device, dtype: str, **execution: bool) -> dict[str, float]:
    """Gradients of a mini-batch for several micro-batch limits, compared with single rows in float32."""
    torch._dynamo.reset()
    rows = batch(rows=12)
    limits = {"all": WHOLE, "600": MicroBatchLimit(1, 600), "250": MicroBatchLimit(1, 250)}
    wanted = row_by_row(language_model(FAMILY), rows, device)
    # Compiles the log-prob kernels first (GPUs always compile them), so that the count below covers layers only.
    plain = engine(language_model(FAMILY), device, getattr(torch, dtype))
    for limit in limits.values():
        plain.forward(rows, limit)
        gradients(plain, rows, limit)
    torch._dynamo.utils.counters.clear()
    made = engine(language_model(FAMILY), device, getattr(torch, dtype), **execution)
    results = {}
    for tokens, limit in limits.items():
        figures = apart((made.forward(rows, limit), gradients(made, rows, limit)), wanted, rows.response_mask)
        results |= {f"{name}, {tokens} tokens": value for name, value in figures.items()}
    return results | {"compiled frames": torch._dynamo.utils.counters["frames"]["ok"]}


def float16(device: torch.device) -> dict[str, Any]:
    """Updates in float16, one of which overflows; the first gradient is compared with float32's."""
    rows = batch()
    wanted = row_by_row(language_model(FAMILY), rows, device)
    made = engine(language_model(FAMILY), device, torch.float16)
    figures = apart((made.forward(rows, WHOLE), gradients(made, rows, WHOLE)), wanted, rows.response_mask)
    steps = [made.update(rows, loss, WHOLE) for _ in range(6)]
    made.loss_scale.value = 2.0**60
    overflow = made.update(rows, loss, WHOLE)
    made.loss_scale.value = 2.0**10
    after = made.update(rows, loss, WHOLE)
    return {**figures, "steps": steps, "overflow": overflow, "after": after}


def large_network() -> PolicyNetwork:
    """About 13 million weights, so that rounding up to memory blocks hardly matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    return PolicyNetwork(AutoModelForCausalLM.from_config(config, dtype=torch.float32), TEMPERATURE)


def resident(made: TrainingEngine, device: torch.device) -> dict[str, int]:
    """Bytes on the device: those in use, and those unavailable to other processes.

    On CPU, where this is rehearsed, only what weights and the optimizer's states hold is known.
    """
    if device.type == "cpu":
        states = optimizer_states(made.optimizer) if made.settings else ()
        used = held_bytes([*made.network.parameters(), *states])
        return {"used": used, "taken": used}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {"used": torch.cuda.memory_allocated(), "taken": total - free}


def trained(device: torch.device, offloaded: bool) -> dict[str, Any]:
    """Two turns of two updates: losses, log-probs, and memory during and between turns."""
    gc.collect()  # frees engines of earlier tests
    rows = batch()
    sharding = ShardingConfig(**(OFFLOADS if offloaded else {}))
    execution = Execution(device, torch.float32, shares_gpu=True, sharding=sharding)
    made = TrainingEngine(large_network(), execution, SETTINGS)
    weight_bytes = sum(4 * weight.numel() for weight in made.network.parameters())
    losses = []
    for _ in range(2):
        with made.stepping():
            losses += [made.update(rows, loss, WHOLE)["loss"] for _ in range(2)]
            at_work = resident(made, device)
    between = resident(made, device)
    sums = [float(weight.double().sum()) for _, weight in made.full_weights(made.network.language_model)]
    return {
        "losses": losses,
        "log_probs": made.forward(rows, WHOLE)[rows.response_mask].tolist(),
        "sums": sums,
        "weight_bytes": weight_bytes,
        **{f"{name} at work": value for name, value in at_work.items()},
        **{f"{name} between turns": value for name, value in between.items()},
    }


def reference(device: torch.device, offloaded: bool) -> dict[str, Any]:
    """Log-probs of a frozen network in bfloat16, twice, and memory before, during and after."""
    gc.collect()
    rows = batch()
    sharding = ShardingConfig(param_offload=offloaded)
    network = large_network().to(torch.bfloat16)
    made = TrainingEngine(network, Execution(device, torch.bfloat16, shares_gpu=True, sharding=sharding))
    first, second = (made.forward(rows, WHOLE)[rows.response_mask].tolist() for _ in range(2))
    return {
        "log_probs": first,
        "again": second,
        "weight_bytes": sum(2 * weight.numel() for weight in made.network.parameters()),
        "used between turns": resident(made, device)["used"],
    }
