"""Compares the packed engine on this GPU with Transformers row by row. Run it before you trust any times.

    python -m benchmarks.gpu.check [--shape 0.5B]

The reference is float32, one row at a time. In bfloat16 the engine's log-probs differ by rounding (mean 0.07 for a 0.5B
model whose weights are enlarged by half), and its gradients must point the same way (cosine 0.99 and more).
"""

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.common import SHAPES, Results, arguments, random_model
from benchmarks.gpu.train_step import make_batch
from trainer.algorithms.log_probs import log_probs_and_entropy
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.networks import PolicyNetwork
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.sharding import Execution


def gradients(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.grad.float().flatten() for weight in module.parameters() if weight.grad is not None])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    shape, results = SHAPES[options.shape], Results(options.out, "check")
    batch = make_batch(shape, 8, 100, 200, 0.5)
    tokens = int(batch.response_mask.sum())
    model = random_model(shape, device.type, torch.float32)
    with torch.no_grad():  # a fresh model is nearly uniform: make it say something
        for weight in model.parameters():
            weight.mul_(1.5)

    reference: Any = torch.zeros(batch.response_mask.shape, device=device)
    total = torch.zeros((), device=device)
    for row in range(len(batch)):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        ids = batch.token_ids[row : row + 1, :length].to(device)
        log_probs, _ = log_probs_and_entropy(model(ids).logits[0, prompt - 1 : -1], ids[0, prompt:], 1.0)
        advantages = batch.advantages[row, : length - prompt].to(device)
        total = total - (log_probs * advantages).sum() / tokens
        reference[row, : length - prompt] = log_probs.detach()
    total.backward()
    wanted, mask = gradients(model), batch.response_mask
    state = {name: weight.detach().clone() for name, weight in model.state_dict().items()}

    def loss(output: tuple[Tensor, Tensor], part: Batch, _count: Any) -> tuple[Tensor, dict[str, Tensor]]:
        value = -(part.advantages * output[0]).sum() / tokens
        return value, {"loss": value}

    for name, compiled, checkpointing in (("eager", False, False), ("compiled", cuda, False), ("all", cuda, True)):
        model = random_model(shape, device.type, torch.float32)
        model.load_state_dict(state)
        execution = Execution(device, dtype, checkpointing, compiled)
        engine = TrainingEngine(PolicyNetwork(model, 1.0), execution, OptimizerSettings(1e-6, 0.0, 1.0))
        limit = MicroBatchLimit(1, 1200)
        difference = (engine.forward(batch, limit) - reference.cpu())[mask].abs()
        engine.accumulate_gradients(batch, loss, limit)
        got = torch.cat(
            [w.grad.to_local().float().flatten() for w in engine.network.parameters() if w.grad is not None]
        )
        results.add(
            shape=options.shape,
            engine=name,
            mean_difference=round(float(difference.mean()), 5),
            max_difference=round(float(difference.max()), 4),
            gradient_cosine=round(float(torch.nn.functional.cosine_similarity(got, wanted, dim=0)), 5),
            gradient_norm_ratio=round(float(got.norm() / wanted.norm()), 4),
        )
        del engine, model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
