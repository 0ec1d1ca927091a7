"""The families with experts of the tests: their configurations, with four or eight experts in two layers or one."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.models.test_log_probs_by_family import SIZES
from trainer.models.small import build_tokenizer, save_model

GROUPS: dict[str, Any] = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}

# By name of the case: the family and its configuration.
ROUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe, weights normalized": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "mixtral": ("mixtral", LOCAL),
    "olmoe": ("olmoe", EXPERTS),
    "gpt_oss": ("gpt_oss", LOCAL),
    "minimax_m2": ("minimax_m2", LOCAL),
    "glm4_moe": ("glm4_moe", GROUPS),
    "deepseek_v2": ("deepseek_v2", {**GROUPS, **LATENT, "num_key_value_heads": 4, "routed_scaling_factor": 16.0}),
    "deepseek_v2, groups": (
        "deepseek_v2",
        {**GROUPS, **LATENT, "num_key_value_heads": 4, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("deepseek_v3", {**GROUPS, **LATENT, "num_key_value_heads": 4}),
    "qwen3_next": (
        "qwen3_next",
        {
            **{**EXPERTS, "shared_expert_intermediate_size": 16, "num_hidden_layers": 2},
            **{"layer_types": ["linear_attention", "full_attention"]},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        },
    ),
}


def write_experts_model(directory: Path, case: str = "qwen3_moe", **more: Any) -> Path:
    """The directory, with random weights and a tokenizer; `more` are fields of the configuration."""
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    family, special = ROUTED[case]
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | special | ids | {"vocab_size": len(tokenizer), **more})
    save_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer, directory)
    return directory
