"""Writes the table of gpus.md: the fewest GPUs for which `trainer plan` finds a plan. Nothing is measured.

    python docs/tasks/gpus.py            # in an image, or where its packages are installed; two minutes

Models are described by their published config.json alone; no weights are read.
"""

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_suffix(".md")
sys.path.insert(0, str(PAGE.parents[2]))

from trainer.commands.options import load  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402
from trainer.planning.machine import plan_without_cluster  # noqa: E402
from trainer.planning.memory import tight  # noqa: E402

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
}
EXPERTS = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def shape(family: Mapping[str, Any], hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> Any:
    return {
        **family,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": False,
        **more,
    }


MODELS = {
    "Qwen2.5-0.5B": shape(QWEN2, 896, 4864, 24, 14, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "Qwen3-0.6B": shape(QWEN3, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "Qwen3-4B": shape(QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3-8B": shape(QWEN3, 4096, 12288, 36, 32),
    "Qwen3-32B": shape(QWEN3, 5120, 25600, 64, 64),
    "Qwen3-30B-A3B": shape(EXPERTS, 2048, 6144, 48, 32, moe_intermediate_size=768),
    "Qwen3-235B-A22B": shape(EXPERTS, 4096, 12288, 94, 64, moe_intermediate_size=1536),
}
MEMORY = {24: 23, 48: 44, 80: 79, 141: 139, 192: 191}
"""GiB that drivers report, rounded down, by the GB on the label."""
JOB = ["data.train_files=train.parquet", "data.max_prompt_length=1024", "data.max_response_length=3072"]
KINDS = {
    "full": [],
    "offload": [
        "actor.sharding.optimizer_offload=true",
        "actor.sharding.param_offload=true",
        "reference.param_offload=true",
    ],
    "LoRA": ["actor.lora.rank=16"],
}
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


def fits(model: Path, kind: str, gpus: int, gib: int) -> bool:
    """Whether there is a plan without a warning, for engines over some number of a node's GPUs."""
    nodes, each = max(1, gpus // 8), min(gpus, 8)
    for tensor_parallel in (size for size in (1, 2, 4, 8) if size <= each):
        given = [f"model.path={model}", *JOB, *KINDS[kind], f"rollout.tensor_parallel={tensor_parallel}"]
        try:
            plan = plan_without_cluster(load(["grpo"], given), nodes, each, gib)
        except ConfigError:  # it does not fit, or this many GPUs do not divide the model
            continue
        if not tight(plan.shares):
            return True
    return False


def fewest(model: Path, kind: str, gib: int) -> str:
    return next((str(gpus) for gpus in COUNTS if fits(model, kind, gpus, gib)), f">{COUNTS[-1]}")


def row(name: str, folder: Path) -> str:
    """The row of a model, whose config.json is written below the folder."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
    cells = ("/".join(fewest(model, kind, gib) for kind in KINDS) for gib in MEMORY.values())
    return f"| {name} | {' | '.join(cells)} |\n"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as made:
        for name in MODELS:
            page = re.sub(rf"^\| {re.escape(name)} \|.*\n", row(name, Path(made)), page, flags=re.MULTILINE)
    PAGE.write_text(page, encoding="utf-8")
