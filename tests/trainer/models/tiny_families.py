"""Tiny models of families whose files hold their weights in different ways: tied, fused, with experts, with biases."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"n_routed_experts": 8, "first_k_dense_replace": 1, **CHOSEN}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma2": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, **CHOSEN},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, **LATENT, **SHARED},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 8, "n_group": 1, "topk_group": 1, **SHARED},
}


def tiny_model(family: str) -> nn.Module:
    """Random weights in bfloat16; also random are the buffers of its files, which start as zeros."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            buffer.normal_()
    return model


def write_tiny_model(family: str, directory: Path) -> Path:
    """The directory, with the weights in several files."""
    tiny_model(family).save_pretrained(directory, max_shard_size="40KB")
    return directory
