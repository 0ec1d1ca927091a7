"""Sizes, operations and plans of mixtures of experts, against the models that Transformers makes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.planning.sizes import MIXTURES, write_config, write_mixture
from trainer.cluster.nodes import ClusterNode, numbered_slots
from trainer.config.tree import Config
from trainer.errors import DataError
from trainer.planning.activations import gathered_bytes
from trainer.planning.flops import Rows, explains_parameters, forward_flops
from trainer.planning.memory import shares
from trainer.planning.model_size import ModelSize
from trainer.planning.placement import roles_of
from trainer.planning.plan import Plan, plan_of

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "attention_bias": True},
    "gpt_oss": {"num_local_experts": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "minimax_m2": {"num_local_experts": 8},
}


def made(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_total_and_active_parameters_are_those_that_exist_and_those_that_a_token_trains(
    family: str, tmp_path: Path
) -> None:
    size = ModelSize.read(write_config(family, SIZES | FAMILIES[family], tmp_path))
    assert size is not None
    model = made(family)
    assert size.parameters == sum(weight.numel() for weight in model.parameters())
    model(torch.tensor([[3]])).logits.logsumexp(-1).sum().backward()
    active = 0
    for name, weight in model.named_parameters():
        if ".experts." in name and "shared" not in name:
            assert weight.grad is not None
            active += weight[weight.grad.flatten(1).any(1)].numel()
        else:
            active += weight.numel()
    assert size.active == active < size.parameters
    assert explains_parameters(size)


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_that_torch_counts(family: str, tmp_path: Path) -> None:
    size = ModelSize.read(write_config(family, SIZES | FAMILIES[family], tmp_path))
    assert size is not None
    model, tokens = made(family), 24
    model.set_experts_implementation("eager")  # torch does not count grouped products
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(3, 3 + tokens).unsqueeze(0), use_cache=False)
    rows = Rows([tokens], tokens)
    # Attention by its formula computes all pairs, also those of tokens that do not see each other.
    products = forward_flops(size, rows) - forward_flops(size, Rows([tokens], 0)) + _products(size, tokens)
    pairs = 2 * (size.query + (size.value or size.query)) * size.layers * tokens**2
    assert counter.get_total_flops() == pytest.approx(products + pairs, rel=0.02)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_scores_wide_queries_and_adds_narrow_values(family: str, tmp_path: Path) -> None:
    size = ModelSize.read(write_config(family, SIZES | LATENT, tmp_path))
    assert size is not None
    # A second token sees one more: two operations for each channel of its score and of the value.
    more = forward_flops(size, Rows([2], 0)) - 2 * forward_flops(size, Rows([1], 0))
    assert more == 3 * 4 * 2 * ((16 + 8) + 12)
    assert size.key_values == 3 * (24 + 8)  # an engine caches the latent state and the rotated part


def _products(size: ModelSize, tokens: int) -> float:
    """Operations that grow with tokens alone, by the difference of one long row and many short ones."""
    return tokens * (forward_flops(size, Rows([1], 0)) - 2 * (size.query + (size.value or size.query)) * size.layers)


def test_a_dense_model_without_weight_files_is_counted_from_its_configuration(tmp_path: Path) -> None:
    settings = {name: value for name, value in SIZES.items() if "moe" not in name and "experts" not in name}
    size = ModelSize.read(write_config("qwen3", settings, tmp_path))
    assert size is not None
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **settings))
    assert size.parameters == sum(weight.numel() for weight in model.parameters())
    assert size.experts is None


def test_a_model_without_weight_files_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    written = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({**written, "vocab_size": 9, "model_type": "nothing"}))
    with pytest.raises(DataError, match="Transformers cannot load it"):
        ModelSize.read(tmp_path)


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixtures")
    for name in MIXTURES:
        write_mixture(name, root / name)
    return root


@pytest.fixture
def plan(mixtures: Path) -> Callable[..., Plan]:
    def planned(model: str, gpus: int, **sections: Any) -> Plan:
        """The plan of GRPO without a reference, on a node of H200s."""
        config = Config.model_validate(
            {"model": {"path": mixtures / model}, "algorithm": {"advantage": "grpo", "kl_coefficient": 0}, **sections}
        )
        node = ClusterNode("id", "10.0.0.1", cpus=64, gpus=gpus, device_gib=139.8)
        return plan_of(config, numbered_slots([node], gpus, group=None), roles_of(config))

    return planned


def rows(prompt: int, response: int) -> dict[str, Any]:
    return {"data": {"max_prompt_length": prompt, "max_response_length": response}}


def test_published_models_have_their_published_sizes(mixtures: Path) -> None:
    sizes = [ModelSize.read(mixtures / name) for name in MIXTURES]
    # https://huggingface.co/Qwen/Qwen3-30B-A3B and arXiv:2508.10925, which leaves out the embedding of active ones.
    embedding = 201_088 * 2880
    total, active = zip(*[(size.parameters / 1e9, size.active / 1e9) for size in sizes if size], strict=True)
    assert total == pytest.approx((30.5, 20.9), abs=0.05)
    assert (active[0], active[1] - embedding / 1e9) == pytest.approx((3.3, 3.6), abs=0.06)


def test_a_plan_says_what_a_mixture_is_and_divides_experts_that_cost_more_to_gather_than_tokens_to_send(
    plan: Callable[..., Plan],
) -> None:
    planned = plan("30B-A3B", 8, **rows(1024, 7168))
    lines = list(planned.lines())
    assert lines[0] == "actor: 30.53 billion parameters, 3.35 active: 8 of 128 experts in 48 of 48 layers"
    values = {choice.key: choice.value for choice in planned.choices}
    assert values["actor.sharding.expert_parallel"] == 8
    assert any("if it gathers all experts" in line for line in lines)


@pytest.mark.parametrize(
    "sharding",
    [{"expert_parallel": 1}, {"tensor_parallel": 2}, {"reshard_after_forward": 2}],
    ids=lambda given: str(given),
)
def test_experts_are_not_divided_where_that_was_decided_or_is_not_possible(
    plan: Callable[..., Plan], sharding: dict[str, Any]
) -> None:
    planned = plan("30B-A3B", 8, **rows(1024, 7168), actor={"sharding": sharding})
    assert "actor.sharding.expert_parallel" not in {choice.key for choice in planned.choices}


def test_a_rank_holds_and_gathers_its_share_of_the_experts(plan: Callable[..., Plan], mixtures: Path) -> None:
    size = ModelSize.read(mixtures / "30B-A3B")
    assert size is not None
    assert size.experts is not None
    gathered, divided = (
        plan(
            "30B-A3B",
            8,
            **rows(256, 256),
            actor={
                "sharding": {"expert_parallel": parts, "resharding_interval": 1, "gradient_sync_interval": 1},
                "micro_batch_tokens": 1024,
            },
        )
        for parts in (1, 8)
    )
    two_layers = 2 * size.experts.parameters / size.layers * 2
    less = gathered_bytes(size, gathered.config.actor, 2, 8) - gathered_bytes(size, divided.config.actor, 2, 8)
    assert less == pytest.approx(two_layers * 7 / 8, rel=1e-3)
    # All ranks share all weights either way.
    held = [
        next(share for share in shares(p.config, p.placement) if share.role == "actor") for p in (gathered, divided)
    ]
    assert held[0].resting == pytest.approx(held[1].resting)
