"""The sizes of a model that determine its memory, read from its config.json."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.models.files import read_json
from trainer.models.weight_files import parameter_count


@dataclass(frozen=True)
class ModelSize:
    """Widths are numbers of values per token and layer. `parameters` counts those of the files, 0 without files. `head`
    counts those of an output head, 0 if the embedding is the head. In `windowed_layers` a token sees only the last
    `window` tokens, itself included."""

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

    @classmethod
    def read(cls, model: Path) -> "ModelSize | None":
        """The sizes of a model, or None if its config.json has other names for them. Raises DataError if a file is
        damaged."""
        config = read_json(model / "config.json")
        config = config.get("text_config", config)
        try:
            return cls._of(config, parameter_count(model))
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
            return None

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
        embedding, beside_layers = tied.vocabulary * hidden, parameters - tied.layers * tied.layer_parameters
        return replace(tied, head=embedding if beside_layers > 1.5 * embedding else 0)

    @property
    def key_values(self) -> int:
        """Values that the cache of keys and values holds for a token."""
        return 2 * self.layers * self.key_value

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer."""
        attention = 2 * self.hidden * (self.query + self.key_value)
        return attention + 3 * self.hidden * self.intermediate


def _windows(config: dict[str, Any]) -> tuple[int, int]:
    """The number of layers with a window, and its width, by Transformers' names."""
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    kinds = config.get("layer_types") or ["sliding_attention"] * int(config["num_hidden_layers"])
    return (kinds.count("sliding_attention"), window) if window else (0, 0)
