"""Log-probs and gradients of every text family, compared with Transformers' own forward pass on each row alone.

The models are tiny and random. Their weights are enlarged and their biases and sinks are not zero, so that a forgotten
scale, cap, bias, window or sink changes the result.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.algorithms.log_probs import log_probs_and_entropy
from trainer.data.batches.batch import Batch
from trainer.errors import DataError
from trainer.models import attention
from trainer.models.attention import packed_attention
from trainer.models.networks import PolicyNetwork, ValueNetwork, why_not_packed
from trainer.models.packing import PackedRows

TEMPERATURE = 0.7
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
STATES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

PACKED: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3, **WINDOWS},
    "ernie4_5": {},
    "exaone4": WINDOWS,
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, **WINDOWS},
    "gemma3_text": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, **WINDOWS},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "attention_multiplier": 0.5},
    "helium": {},
    "hunyuan_v1_dense": {},
    "llama": {"attention_bias": True},
    "ministral": WINDOWS,
    "mistral": {"sliding_window": 4},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOWS,
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48, "max_position_embeddings": 64},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, **WINDOWS},
    "qwen3": {},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 4},
    "vaultgemma": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, **WINDOWS},
}
PADDED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], **STATES},
    "falcon_h1": {"mamba_d_ssm": 64, "lm_head_multiplier": 0.3, **STATES},
    "falcon_mamba": {"state_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "minimax": {"num_local_experts": 4, "block_size": 4, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"attention_window_size": 4, "logits_soft_cap": 3.0, "lru_width": 32, "num_hidden_layers": 3},
    "stablelm": {"partial_rotary_factor": 0.5},
}
FAMILIES = PACKED | PADDED


def language_model(family: str, special: Mapping[str, Any] | None = None) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | (FAMILIES[family] if special is None else special))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                weight.normal_(std=0.5)
            elif weight.dim() > 1:
                weight.mul_(0.3 / weight.std())
    return model


def rows() -> Batch:
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> list[int]:
        return torch.randint(3, 50, (length,), generator=generator).tolist()

    prompts, responses = [tokens(n) for n in (3, 1, 9, 2)], [tokens(n) for n in (5, 2, 1, 13, 4, 6, 3)]
    prompts += [prompts[2], prompts[0], prompts[2]]  # have several responses
    return Batch.from_responses(prompts, responses, [[-1.0] * len(response) for response in responses])


def one_by_one(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy by Transformers' own forward pass."""
    log_probs, entropy = torch.zeros(batch.response_mask.shape), torch.zeros(batch.response_mask.shape)
    for row in range(len(batch)):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        ids = batch.token_ids[row : row + 1, :length]
        logits = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1]
        computed = log_probs_and_entropy(logits, ids[0, prompt:], TEMPERATURE)
        log_probs[row, : length - prompt], entropy[row, : length - prompt] = computed
    return log_probs, entropy


def gradients(model: nn.Module, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (log_probs.square().sum() + 0.3 * entropy.sum()).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("multiple", [1, 16])  # the length to which a line is filled up
@pytest.mark.parametrize(
    ("family", "share_prompts"), [*((family, False) for family in FAMILIES), *((family, True) for family in PACKED)]
)
def test_log_probs_and_gradients_are_those_of_transformers(family: str, multiple: int, share_prompts: bool) -> None:
    model, batch = language_model(family), rows()
    expected = one_by_one(model, batch)
    wanted = gradients(model, *expected)
    computed = PolicyNetwork(model, TEMPERATURE)(PackedRows.of(batch, multiple, share_prompts))
    assert_close(computed[0], expected[0], atol=1e-4, rtol=1e-4)
    assert_close(computed[1], expected[1], atol=1e-4, rtol=1e-4)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in gradients(model, *computed).items():
        assert_close(gradient, wanted[name], atol=1e-4 * largest, rtol=1e-3, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_measured_without_weights(family: str) -> None:
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    network = PolicyNetwork(model, TEMPERATURE)
    settings = FAMILIES[family]
    cap = settings.get("final_logit_softcapping", settings.get("logits_soft_cap"))
    scale = settings.get("logit_scale", settings.get("lm_head_multiplier", 1 / settings.get("logits_scaling", 1)))
    assert network.output_head.cap == (None if cap is None else pytest.approx(cap))
    assert network.output_head.scale == pytest.approx(scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_read_the_hidden_states_of_single_rows(family: str) -> None:
    model, batch = language_model(family), rows()
    with torch.no_grad():
        ids = [batch.token_ids[row : row + 1, : int(length)] for row, length in enumerate(batch.lengths)]
        hidden = [model.get_decoder()(input_ids=row_ids, use_cache=False).last_hidden_state[0] for row_ids in ids]
        network = ValueNetwork(model)
        nn.init.normal_(network.head.weight)
        values = network(PackedRows.of(batch))
        for row, states in enumerate(hidden):
            prompt, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
            wanted = network.head(states[prompt - 1 : -1]).squeeze(-1)
            assert_close(values[row, : length - prompt], wanted, atol=1e-3, rtol=1e-3)


def test_families_that_cannot_be_packed_are_padded_for_a_reason() -> None:
    reasons = {family: why_not_packed(language_model(family)) for family in FAMILIES}
    assert {family for family, reason in reasons.items() if reason} == set(PADDED)
    assert reasons["lfm2"] == "it has layers of the kind conv"
    assert reasons["bamba"] == "its layers have a recurrent state"


def test_layers_that_drop_the_bounds_of_rows_are_refused() -> None:
    network = PolicyNetwork(language_model("nemotron", {}), TEMPERATURE)
    with pytest.raises(DataError, match="NemotronAttention cannot attend within the rows of a packed line"):
        network(PackedRows.of(rows()))


def test_models_that_see_later_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="log-probs of bert models cannot be computed"):
        PolicyNetwork(language_model("bert", {}), TEMPERATURE)


@pytest.mark.parametrize("key_heads", [2, 4])
def test_sinks_beside_torchs_flash_kernel_of_the_cpu_in_place_of_the_gpus_are_those_of_the_formula(
    key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence, because the kernel of the CPU knows no bounds, and each key-value head as often as it is read."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(7, heads, 8, generator=generator) for heads in (4, key_heads, key_heads)]
    sinks, gradient = torch.randn(4, generator=generator), torch.randn(7, 4, 8, generator=generator)
    lengths = (torch.tensor([0, 7]), torch.tensor([0, 7]), 7, 7)

    def of_cpu(tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(4 // tensor.shape[1], dim=1).transpose(0, 1).unsqueeze(0)

    def forward(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = kernel(*map(of_cpu, (query, key, value)), 0.0, True, scale=given[1])
        return output[0].transpose(0, 1), lse[0]

    def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *given: Any):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        line = map(of_cpu, (grad, query, key, value, output))
        of_heads = kernel(*line, lse.unsqueeze(0), 0.0, True, scale=given[1])
        whole = (part[0].transpose(0, 1) for part in of_heads)
        return tuple(
            part.unflatten(1, (read.shape[1], -1)).sum(2) for part, read in zip(whole, (query, key, value), strict=True)
        )

    monkeypatch.setattr(attention, "flash_forward", forward)
    monkeypatch.setattr(attention, "flash_backward", backward)

    def with_gradients(attend: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (*tensors, sinks)]
        output = attend(*leaves)
        output.backward(gradient)
        return [output.detach(), *(leaf.grad for leaf in leaves)]

    flash = with_gradients(lambda *leaves: attention._by_flash(*leaves[:3], lengths, 0.3, None, leaves[3]))
    formula = with_gradients(
        lambda *leaves: attention._by_formula(*leaves[:3], lengths[0], 7, 0.3, None, None, leaves[3])
    )
    for by_flash, by_formula in zip(flash, formula, strict=True):
        assert_close(by_flash, by_formula)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_by_the_formula_is_the_same_in_blocks(
    cap: float | None, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, heads, 12, 8, generator=generator) for heads in (4, 2, 2)]
    offsets, sinks = torch.tensor([0, 5, 12], dtype=torch.int32), torch.randn(4, generator=generator)

    def attended() -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (*tensors, sinks)]
        attended_values, _ = packed_attention(
            nn.Module(),
            *leaves[:3],
            None,
            sliding_window=window,
            softcap=cap,
            s_aux=leaves[3],
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=7,
            max_length_k=7,
        )
        attended_values.square().sum().backward()
        return [attended_values.detach(), *(leaf.grad for leaf in leaves)]

    whole = attended()
    monkeypatch.setattr(attention, "SCORES_PER_BLOCK", 2 * 4 * 7 * 2)  # two tokens of each sequence
    for blockwise, other in zip(attended(), whole, strict=True):
        assert_close(blockwise, other)
