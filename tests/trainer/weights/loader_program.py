"""Loads weights into vLLM's models on CPU, for test_in_place.py: `loader_program.py DIRECTORY`.

Prints a line for each family: how many buckets there were, and how often vLLM's loader was called in each of three
rounds.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
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

from trainer.models.names_in_files import as_in_files, views_in_files
from trainer.training.ranks.process_group import open_store
from trainer.weights.buckets import Bucket, pack
from trainer.weights.in_place import InPlaceLoader
from trainer.weights.slices import in_slices

BUCKET_BYTES = 2**15

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
SHARED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16, **MIXTURE},  # first, because it needs more process groups than the others
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        **LATENT,
        **SHARED,
    },
    "glm4_moe": {"head_dim": 16, "n_group": 1, "topk_group": 1, **SHARED},
    "gpt_oss": {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "mistral": {"head_dim": 16},
}


def main(directory: Path) -> None:
    for family, sizes in FAMILIES.items():
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | sizes), dtype=torch.bfloat16)
        for name, buffer in made.named_buffers():
            if name in made.state_dict():
                buffer.data = buffer.float()  # as Transformers loads them
        made.config.architectures = [type(made).__name__]
        made.config.save_pretrained(directory / family)
        model = engine_model(directory / family)
        buckets, calls = rounds(model, made)
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


def sent(made: nn.Module) -> list[Bucket]:
    """The buckets that an actor sends. Experts of one weight are in several of them."""
    stored = made.state_dict()
    views = views_in_files(made, {name: tensor.shape for name, tensor in stored.items()})
    assert views is not None
    weights = in_slices(as_in_files(made.named_parameters(), views), torch.bfloat16, BUCKET_BYTES)
    buffers = [(name, buffer) for name, buffer in made.named_buffers() if name in stored]
    return [*pack(weights, torch.bfloat16, BUCKET_BYTES), *pack(as_in_files(buffers, views), None)]


def check_places(
    model: nn.Module, made: nn.Module, load_weights: Callable[[Iterable[tuple[str, Tensor]]], Any]
) -> None:
    """Compares the engine's weights with those that its own loader puts there from whole tensors of the files."""
    copied = {name: weight.clone() for name, weight in model.named_parameters()}
    stored = made.state_dict()
    load_weights(
        as_in_files(stored.items(), views_in_files(made, {name: tensor.shape for name, tensor in stored.items()}))
    )
    different = [name for name, weight in model.named_parameters() if not torch.equal(weight, copied[name])]
    assert not different, f"{type(model).__name__}: {different}"


def rounds(model: nn.Module, made: nn.Module) -> tuple[int, list[int]]:
    """The number of calls of the model's loader that load all buckets, and the calls in each update."""
    plain, times = model.load_weights, [0]

    def load_weights(given: Iterable[tuple[str, Tensor]]) -> Any:
        times[-1] += 1
        return plain(given)

    object.__setattr__(model, "load_weights", load_weights)
    loader = InPlaceLoader(model)
    for _ in range(3):
        for tensor in made.state_dict().values():
            tensor.normal_()
        buckets = sent(made)
        loader.load(buckets)  # compares checksums
        check_places(model, made, plain)
        times.append(0)
    slices = [sum("[" in name for name in bucket.layout.names) for bucket in buckets]
    whole = [len(bucket.layout.names) for bucket in buckets]
    return sum(cut + (cut < names) for cut, names in zip(slices, whole, strict=True)), times[:-1]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
