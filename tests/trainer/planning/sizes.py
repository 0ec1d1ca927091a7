"""Model directories with sizes and without weights, and the shares of roles on devices of any size."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from trainer.cluster.nodes import Slot
from trainer.planning.memory import Share

# hidden, intermediate, layers, heads, heads of keys and values, weights: Qwen2.5's, Qwen3's (0.6B, 4B, 8B), Llama's
SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 494_032_768),
    "0.6B": (1024, 3072, 28, 16, 8, 596_049_920),
    "1.5B": (1536, 8960, 28, 12, 2, 1_543_714_304),
    "3B": (2048, 11008, 36, 16, 2, 3_085_938_688),
    "4B": (2560, 9728, 36, 32, 8, 4_022_468_096),
    "7B": (3584, 18944, 28, 28, 4, 7_615_616_512),
    "8B": (4096, 12288, 36, 32, 8, 8_190_735_360),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 8_030_261_248),
    "32B": (5120, 27648, 64, 40, 8, 32_763_876_352),
}
OTHERS = {
    "0.6B": {"head_dim": 128},
    "4B": {"head_dim": 128},
    "8B": {"head_dim": 128},
    "Llama-3.1-8B": {"vocab_size": 128_256},
}


def write_sizes(name: str, directory: Path) -> Path:
    """A directory with config.json, and with the header of a file of weights without data."""
    hidden, intermediate, layers, heads, key_value_heads, weights = SIZES[name]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": 151_936,
        **OTHERS.get(name, {}),
    }
    header = json.dumps({"w": {"dtype": "BF16", "shape": [weights], "data_offsets": [0, 0]}}).encode()
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


# Families and sizes of published mixtures of experts.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "30B-A3B": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151_936,
        },
    ),
    "gpt-oss-20b": ("gpt_oss", {"num_local_experts": 32, "num_hidden_layers": 24}),
}


def write_mixture(name: str, directory: Path) -> Path:
    """A directory with config.json and without weights."""
    family, settings = MIXTURES[name]
    return write_config(family, settings, directory)


def write_config(family: str, settings: Mapping[str, Any], directory: Path) -> Path:
    """A directory with a configuration of Transformers and without weights."""
    AutoConfig.for_model(family, **settings).save_pretrained(directory)
    return directory


def with_memory(planned: Sequence[Share], gib: float | None) -> list[Share]:
    """The shares on devices with this memory."""

    def slot(share: Share) -> Slot:
        return replace(share.slot, node=replace(share.slot.node, device_gib=gib))

    return [replace(share, slot=slot(share)) for share in planned]
