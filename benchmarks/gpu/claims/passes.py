"""The actor's forward pass and the critic's update on one rank, beside FSDP2 written by hand.

The baseline follows torch's FSDP2 tutorial and Transformers' classes: a language model, and one with a head of one
number per token, as the critic; each layer and the root sharded, bfloat16 with float32 master weights, torch's own
attention, a fused AdamW, rows padded to the longest of their micro-batch, and as many of them as the limit of tokens,
the same on both sides, allows. Its log-probs come from logits of the response only. Neither side is set to recompute
activations.

Both compute the same rows with the same weights. The forward pass must give the same log-probs.
"""

import argparse
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.gpu.common import SHAPES, Shape, alone, qwen2_config, random_model, seconds
from benchmarks.gpu.train_step import make_batch, value_loss
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.networks import PolicyNetwork, ValueNetwork
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.sharding import Execution

SPREAD = 0.75  # responses have between a quarter of the limit and the limit
SAME = 0.9  # lowest correlation of the two sides' log-probs, which differ by the rounding of bfloat16


def forward(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the log-probs of all responses."""
    sides = measured(options, forward_by_hand, forward_here)
    both = torch.stack([sides[side].pop("log_probs") for side in ("baseline", "ours")])
    sides["correlation"] = round(float(torch.corrcoef(both)[0, 1]), 4)
    if not sides["correlation"] > SAME:
        raise ValueError(f"the two sides do not compute the same: their log-probs correlate by {sides['correlation']}")
    return sides


def critic(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and memory of an update of the critic: forward and backward passes and the optimizer step."""
    return measured(options, update_by_hand, update_here)


def measured(options: argparse.Namespace, by_hand: Any, here: Any) -> dict[str, Any]:
    rows, prompt, response, tokens = (16, 32, 64, 384) if options.cpu else (128, 256, 512, 16384)
    batch = make_batch(SHAPES[options.shape], rows, prompt, response, SPREAD)
    return {
        "job": f"{rows} rows of {prompt} and {round(response * (1 - SPREAD))} to {response} tokens, "
        f"micro-batches of at most {tokens:,}",
        "baseline": alone(by_hand, options, batch, tokens),
        "ours": alone(here, options, batch, tokens),
    }


def forward_here(options: argparse.Namespace, batch: Batch, tokens: int) -> dict[str, Any]:
    with one_rank(options.cpu) as device:
        network = PolicyNetwork(random_model(SHAPES[options.shape], device.type, torch.float32), 1.0)
        engine, limit = TrainingEngine(network, _execution(device)), MicroBatchLimit(1, tokens)
        taken = seconds(lambda: engine.forward(batch, limit), options.repeats)
        log_probs = engine.forward(batch, limit)[batch.response_mask]
        return {"seconds": round(taken, 4), "log_probs": log_probs, **_peak(device)}


def update_here(options: argparse.Namespace, batch: Batch, tokens: int) -> dict[str, float]:
    with one_rank(options.cpu) as device:
        network = ValueNetwork(random_model(SHAPES[options.shape], device.type, torch.float32))
        engine = TrainingEngine(network, _execution(device), OptimizerSettings(1e-6, 0.0, 1.0))
        limit = MicroBatchLimit(1, tokens)
        taken = seconds(lambda: engine.update(batch, value_loss, limit), options.repeats)
        return {"seconds": round(taken, 4), **_peak(device)}


def _execution(device: torch.device) -> Execution:
    """As the trainer's defaults have it."""
    return Execution(device, _dtype(device), compile_layers=device.type == "cuda")


def forward_by_hand(options: argparse.Namespace, batch: Batch, tokens: int) -> dict[str, Any]:
    with one_rank(options.cpu) as device:
        model = sharded(random_model(SHAPES[options.shape], device.type, torch.float32), device).eval()
        chunks: list[Tensor] = []

        def run() -> None:
            chunks.clear()
            with torch.no_grad():
                for part in batch.micro_batches(rows_that_fit(batch, tokens)):
                    ids, mask = part.token_ids.to(device), response_mask(part)
                    width = mask.shape[1]
                    logits = model(ids, attention_mask=attended(part).to(device), logits_to_keep=width + 1).logits
                    log_probs = logits[:, :-1].float().log_softmax(dim=-1)
                    chunks.append(log_probs.gather(2, ids[:, -width:, None]).squeeze(2).cpu()[mask])

        taken = seconds(run, options.repeats)
        return {"seconds": round(taken, 4), "log_probs": torch.cat(chunks), **_peak(device)}


def update_by_hand(options: argparse.Namespace, batch: Batch, tokens: int) -> dict[str, float]:
    with one_rank(options.cpu) as device:
        model = sharded(token_classifier(SHAPES[options.shape], device), device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=device.type == "cuda")
        count = int(batch.response_mask.sum())

        def run() -> None:
            for part in batch.micro_batches(rows_that_fit(batch, tokens)):
                mask = response_mask(part)
                width = mask.shape[1]
                output = model(part.token_ids.to(device), attention_mask=attended(part).to(device))
                # The value of a token is that of the state before it.
                values = output.logits.squeeze(2)[:, -width - 1 : -1].float()
                assert part.returns is not None
                errors = (values - part.returns[:, :width].to(device)).square() * mask.to(device)
                (errors.sum() / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return {"seconds": round(seconds(run, options.repeats), 4), **_peak(device)}


def token_classifier(shape: Shape, device: torch.device) -> nn.Module:
    """Transformers' class for a number per token, with random weights."""
    from transformers import Qwen2ForTokenClassification

    config = qwen2_config(shape)
    config.num_labels, config.classifier_dropout = 1, 0.0
    torch.manual_seed(0)
    with device:
        model: nn.Module = Qwen2ForTokenClassification(config).to(torch.float32)
    return model


def sharded(model: nn.Module, device: torch.device) -> nn.Module:
    """FSDP2 as its tutorial shows it."""
    policy = MixedPrecisionPolicy(param_dtype=_dtype(device), reduce_dtype=torch.float32)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def rows_that_fit(batch: Batch, tokens: int) -> int:
    """How many rows of the longest length this many tokens are."""
    return max(1, tokens // batch.token_ids.shape[1])


def response_mask(part: Batch) -> Tensor:
    """The mask of a micro-batch without the columns that are padding in all of its rows. All prompts are as long."""
    return part.response_mask[:, : part.token_ids.shape[1] - int(part.prompt_lengths[0])]


def attended(batch: Batch) -> Tensor:
    """1 for tokens, 0 for padding, [rows, length] int64."""
    return (torch.arange(batch.token_ids.shape[1]) < batch.lengths[:, None]).long()


@contextmanager
def one_rank(cpu: bool) -> Iterator[torch.device]:
    """A process group of this process alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield torch.device("cpu" if cpu else "cuda")
    finally:
        dist.destroy_process_group()


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _peak(device: torch.device) -> dict[str, float]:
    """The most memory that torch held at once; nothing on a CPU."""
    return {"gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)} if device.type == "cuda" else {}
