"""The sizes of a model that determine its memory.

Those of dense models follow from config.json and the headers of their files. Mixtures of experts are counted in the
model that Transformers makes of their config.json, on the device `meta`: families differ in shared experts, dense
layers, biases and latent attention, and files may hold quantised experts.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.models.files import read_json
from trainer.models.weight_files import parameter_count

# What families call the number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture: `number` in each of `layers` layers, of which a router chooses `chosen` for a token.
    `width` is the intermediate size of an expert. `parameters` counts all experts of the model, `others` all other
    matrices of its layers: attention, routers, shared experts, dense layers."""

    number: int
    chosen: int
    width: int
    layers: int
    parameters: int
    others: int

    @property
    def unused(self) -> int:
        """Parameters of the experts that a token is not routed to."""
        return self.parameters - self.parameters * self.chosen // self.number


@dataclass(frozen=True)
class ModelSize:
    """Widths are numbers of values per token and layer; those of a mixture are averages over layers, without experts.
    `head` counts parameters of an output head, 0 if the embedding is the head. In `windowed_layers` a token sees only
    the last `window` tokens, itself included. `value` is the width of what attention returns, 0 if it is that of the
    queries; `latent` the width of a cache that holds keys and values together, 0 if it holds both."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    query: int
    key_value: int
    key_value_heads: int
    vocabulary: int
    windowed_layers: int = 0
    window: int = 0
    head: int = 0
    value: int = 0
    latent: int = 0
    experts: Experts | None = None

    @classmethod
    def read(cls, model: Path) -> "ModelSize | None":
        """The sizes of a model, or None if its config.json has other names for them.

        Raises DataError if a file is damaged, or if there is no file with weights and Transformers cannot make the
        model.
        """
        config = read_json(model / "config.json")
        text = config.get("text_config", config)
        try:
            if any(int(text.get(name) or 0) for name in _EXPERTS):
                return _mixture(model, json.dumps(config))
            return cls._of(text, parameter_count(model) or _counted(model, json.dumps(config)))
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
            return None

    @classmethod
    def of_mixture(cls, language_model: Any) -> "ModelSize | None":
        """The sizes of a mixture of experts that Transformers made, on any device; None if they are unknown."""
        config, layers = language_model.config.get_text_config(), language_model.get_decoder().layers
        experts = _experts_of(layers, config)
        if experts is None:
            return None
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        key_value_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        width, latent = int(getattr(config, "head_dim", None) or hidden // heads), 0
        query, key, value = heads * width, key_value_heads * width, key_value_heads * width
        if getattr(config, "kv_lora_rank", None):  # latent attention (DeepSeek): keys and values for every head
            query = key = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
            value, latent = heads * config.v_head_dim, config.kv_lora_rank + config.qk_rope_head_dim
        attention = sum(_matrices(layer.self_attn.parameters()) for layer in layers)
        routers = experts.layers * experts.number * hidden
        head, embedding = language_model.get_output_embeddings(), language_model.get_input_embeddings()
        return cls(
            sum(weight.numel() for weight in language_model.parameters()),
            len(layers),
            hidden,
            (experts.others - attention - routers) // (3 * hidden * len(layers)),
            query,
            (key + value) // 2,
            key_value_heads,
            int(config.vocab_size),
            *_windows(config.to_dict()),
            head=0 if head is None or head.weight is embedding.weight else head.weight.numel(),
            value=value if latent else 0,
            latent=latent,
            experts=experts,
        )

    @classmethod
    def _of(cls, config: dict[str, Any], parameters: int) -> "ModelSize":
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        key_value_heads = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or hidden // heads)
        tied = cls(
            parameters,
            int(config["num_hidden_layers"]),
            hidden,
            int(config["intermediate_size"]),
            heads * width,
            key_value_heads * width,
            key_value_heads,
            int(config["vocab_size"]),
            *_windows(config),
        )
        # By the files, because families differ in what they do where config.json does not say it.
        embedding, beside_layers = tied.vocabulary * hidden, parameters - tied.matrices
        return replace(tied, head=embedding if beside_layers > 1.5 * embedding else 0)

    @property
    def key_values(self) -> int:
        """Values that the cache of keys and values holds for a token."""
        return self.layers * (self.latent or 2 * self.key_value)

    @property
    def matrices(self) -> int:
        """Weights of the matrices of all layers."""
        if self.experts is not None:
            return self.experts.others + self.experts.parameters
        attention = 2 * self.hidden * (self.query + self.key_value)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def active(self) -> int:
        """Parameters that take part in computing a token: all but those of experts that it is not routed to."""
        return self.parameters - (0 if self.experts is None else self.experts.unused)


def _experts_of(layers: Iterable[Any], config: Any) -> Experts | None:
    """The experts in a model's layers; None without any."""
    from trainer.models.experts import expert_modules  # takes seconds, and few runs need it

    modules = [expert_modules(layer) for layer in layers]
    weights = [weight for inside in modules for module in inside for weight in module.parameters()]
    if not weights:
        return None
    sparse, number = sum(map(bool, modules)), max(module.num_experts for inside in modules for module in inside)
    count = sum(weight.numel() for weight in weights)
    others = sum(_matrices(layer.parameters()) for layer in layers) - _matrices(weights)
    width = round(count / (3 * int(config.hidden_size) * number * sparse))
    return Experts(number, int(config.num_experts_per_tok), width, sparse, count, others)


def _matrices(weights: Iterable[Any]) -> int:
    """The numbers in all weights that are no vectors."""
    return sum(weight.numel() for weight in weights if weight.ndim > 1)


def parameters(model: Path) -> int:
    """The number of parameters of a model. Raises DataError like `ModelSize.read`."""
    size = ModelSize.read(model)
    return parameter_count(model) if size is None else size.parameters


@lru_cache(maxsize=8)
def _mixture(model: Path, _config: str) -> ModelSize | None:
    from trainer.models.pretrained import empty_language_model  # takes seconds, and few runs need it

    try:
        return ModelSize.of_mixture(empty_language_model(model))
    except DataError:
        return None  # a family that Transformers knows only with images, or not at all


@lru_cache(maxsize=8)
def _counted(model: Path, _config: str) -> int:
    from trainer.models.pretrained import empty_language_model

    return sum(weight.numel() for weight in empty_language_model(model).parameters())


def _windows(config: dict[str, Any]) -> tuple[int, int]:
    """The number of layers with a window, and its width, by Transformers' names."""
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    kinds = config.get("layer_types") or ["sliding_attention"] * int(config["num_hidden_layers"])
    return (kinds.count("sliding_attention"), window) if window else (0, 0)
