"""Loads weights into vLLM's models on CPU, for test_in_place.py: `loader_program.py DIRECTORY`.

Prints a line for each family: how many buckets there were, and how often vLLM's loader was called in each of three
rounds.
"""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1")

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from trainer.training.ranks.process_group import open_store
from trainer.weights.buckets import pack
from trainer.weights.in_place import InPlaceLoader

SIZES = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16, **MIXTURE},  # first, because it needs more process groups than the others
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "mistral": {"head_dim": 16},
}


def main(directory: Path) -> None:
    for family, sizes in FAMILIES.items():
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **sizes), dtype=torch.bfloat16)
        made.config.architectures = [type(made).__name__]
        made.config.save_pretrained(directory / family)
        model = engine_model(directory / family)
        buckets, calls = rounds(model, list(made.named_parameters()))
        sys.stdout.write(json.dumps({"family": family, "buckets": buckets, "calls": calls}) + "\n")


def engine_model(directory: Path) -> nn.Module:
    """The model as vLLM builds it, on CPU in bfloat16, before weights are packed for its kernels."""
    arguments = EngineArgs(str(directory), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    config: VllmConfig = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            store = open_store("127.0.0.1", 1, 60)
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            init_distributed_environment(1, 0, backend="gloo")
            ensure_model_parallel_initialized(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        try:
            return initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(torch.float32)


def rounds(model: nn.Module, weights: list[tuple[str, Tensor]]) -> tuple[int, list[int]]:
    """The number of buckets, and the calls of the model's loader in each update."""
    plain, times = model.load_weights, [0]

    def load_weights(given: Iterable[tuple[str, Tensor]]) -> Any:
        times[-1] += 1
        return plain(given)

    object.__setattr__(model, "load_weights", load_weights)
    loader = InPlaceLoader(model)
    for _ in range(3):
        for _, weight in weights:
            weight.data.normal_()
        buckets = list(pack(weights, torch.bfloat16, bucket_bytes=2**16))
        loader.load(buckets)  # compares checksums
        times.append(0)
    return len(buckets), times[:-1]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
