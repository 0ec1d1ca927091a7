"""The forward pass of a Qwen2 model from shared operators, and the records of what each of them gave."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.common import SHAPES, random_model
from benchmarks.gpu.exactness import operators as ops
from benchmarks.gpu.exactness.operators import Bounds
from benchmarks.gpu.exactness.sampling import Line

CHUNK = 2048  # tokens whose logits exist at once


@dataclass(frozen=True)
class Operators:
    product: Any
    norm: Any
    rope: Any
    silu: Any
    attention: Any
    log_probs: Any


FORMULAS = Operators(
    ops.torch_product, ops.formula_norm, ops.wide_rope, ops.torch_silu, ops.formula_attention, ops.formula_log_probs
)


def shared(product: Any) -> Operators:
    """Those that gave the bits of vLLM's engine."""
    return Operators(product, ops.own_norm, ops.vllm_rope, ops.torch_silu, ops.flash_attention, ops.vllm_log_probs)


@dataclass(frozen=True)
class Model:
    """The weights of a Qwen2 model, merged as the engine merges them, and its sizes."""

    embedding: Tensor
    head: Tensor
    norm: Tensor
    layers: list[dict[str, Tensor]]
    heads: int
    groups: int
    width: int
    eps: float
    base: float

    @classmethod
    def of(cls, language_model: Any) -> "Model":
        config, decoder = language_model.config, language_model.model
        layers = []
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
            layers.append(
                {
                    "input_norm": layer.input_layernorm.weight.detach(),
                    "post_norm": layer.post_attention_layernorm.weight.detach(),
                    "qkv": torch.cat([part.weight.detach() for part in qkv]),
                    "qkv_bias": torch.cat([part.bias.detach() for part in qkv]),
                    "o": attention.o_proj.weight.detach(),
                    "gate_up": torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]),
                    "down": mlp.down_proj.weight.detach(),
                }
            )
        return cls(
            embedding=decoder.embed_tokens.weight.detach(),
            head=language_model.lm_head.weight.detach(),
            norm=decoder.norm.weight.detach(),
            layers=layers,
            heads=config.num_attention_heads,
            groups=config.num_key_value_heads,
            width=head_width(config),
            eps=config.rms_norm_eps,
            base=rope_base(config),
        )

    def attend(self, chosen: Operators, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds) -> Tensor:
        parts = (tensor.reshape(len(tensor), -1, self.width) for tensor in (query, key, value))
        result: Tensor = chosen.attention(*parts, bounds, self.width**-0.5)
        return result.flatten(1)


def head_width(config: Any) -> int:
    return int(config.hidden_size // config.num_attention_heads)


def rope_base(config: Any) -> float:
    return float(config.rope_parameters["rope_theta"])


@torch.no_grad()  # type: ignore[untyped-decorator]
def hidden_states(
    model: Model, chosen: Operators, line: Line, cache: Tensor, record: dict[str, list[Tensor]] | None = None
) -> Tensor:
    """Normalised, [tokens, hidden]. `record` receives every operator's results, named as vLLM's modules."""

    def note(name: str, *values: Tensor) -> None:
        if record is not None:
            record[name] = [value.clone().reshape(len(value), -1) for value in values]

    queries, keys = model.heads * model.width, model.groups * model.width
    hidden, residual = functional.embedding(line.ids, model.embedding), None
    for number, layer in enumerate(model.layers):
        if residual is None:
            residual, hidden = hidden, chosen.norm(hidden, layer["input_norm"], model.eps)
            note(f"{number}.input_layernorm", hidden)
        else:
            hidden, residual = chosen.norm(hidden, layer["input_norm"], model.eps, residual)
            note(f"{number}.input_layernorm", hidden, residual)
        hidden = chosen.product(hidden, layer["qkv"], layer["qkv_bias"])
        note(f"{number}.qkv_proj", hidden)
        query, key, value = hidden.split([queries, keys, keys], dim=-1)
        query, key = chosen.rope(line.positions, query, key, model.width, cache)
        note(f"{number}.rotary_emb", query, key)
        hidden = model.attend(chosen, query, key, value, line.bounds)
        note(f"{number}.attn", hidden)
        hidden = chosen.product(hidden, layer["o"], None)
        note(f"{number}.o_proj", hidden)
        hidden, residual = chosen.norm(hidden, layer["post_norm"], model.eps, residual)
        note(f"{number}.post_attention_layernorm", hidden, residual)
        hidden = chosen.product(hidden, layer["gate_up"], None)
        note(f"{number}.gate_up_proj", hidden)
        hidden = chosen.silu(hidden)
        note(f"{number}.act_fn", hidden)
        hidden = chosen.product(hidden, layer["down"], None)
        note(f"{number}.down_proj", hidden)
    hidden, residual = chosen.norm(hidden, model.norm, model.eps, residual)
    note("norm", hidden)
    return hidden


@torch.no_grad()  # type: ignore[untyped-decorator]
def log_probs(model: Model, chosen: Operators, line: Line, cache: Tensor, temperature: float) -> Tensor:
    """Of all response tokens, [response tokens] float32."""
    hidden = hidden_states(model, chosen, line, cache)[line.predicting]
    parts = zip(hidden.split(CHUNK), line.targets.split(CHUNK), strict=True)
    return torch.cat(
        [chosen.log_probs(chosen.product(part, model.head, None), ids, temperature) for part, ids in parts]
    )


def save_peaked_model(shape: str, directory: Path, device: str) -> None:
    """Random weights, but biases and norms are not 0 and 1, and some tokens are likely, as in a trained model."""
    model = random_model(SHAPES[shape], device, torch.bfloat16)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if label.endswith("bias"):
                weight.normal_(0, 0.5)
            elif "norm" in label:
                weight.uniform_(0.5, 1.5)
            elif "layers" in label:
                weight.mul_(1.5)
        model.model.norm.weight.mul_(4)
    model.save_pretrained(directory)
