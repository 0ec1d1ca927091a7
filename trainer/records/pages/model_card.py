"""README.md of an exported model: the run it comes from, its settings and its metrics."""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.hub import repository_of
from trainer.records.files.records import METRICS, METRICS_ROWS, read_records

logger = logging.getLogger(__name__)

CARD = "README.md"
_PLACE = "DIRECTORY"
_SHOWN = ("validation/", "reward/", "rollout/response_length", "actor/entropy", "reference/kl", "dpo/", "sft/")
_TEMPLATE = """---
library_name: transformers
{base_model}pipeline_tag: text-generation
tags:
  - slipway
  - reinforcement-learning
---

# {run}, step {step}

| | |
| --- | --- |
| run | {run} |
| step | {step} |
| base model | {base} |
| settings (sha256) | {digest} |

## Metrics

The latest values up to this step.

| metric | value | step |
| --- | --- | --- |
{metrics}
## Use

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = (kind.from_pretrained("DIRECTORY") for kind in (AutoModelForCausalLM, AutoTokenizer))

or `vllm serve DIRECTORY`.
"""


def settings_digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 of the settings, equal for equal settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def write_model_card(directory: Path, run_dir: Path, step: int, base: Path, settings: Mapping[str, Any]) -> None:
    """Writes the card into a model's directory. `settings` are those of the whole run. Raises DataError."""
    latest: dict[str, tuple[float, int]] = {}
    for row in read_records(run_dir / METRICS, METRICS_ROWS, logger.warning):
        if row["step"] <= step:
            latest |= {name: (value, int(row["step"])) for name, value in row.items() if name.startswith(_SHOWN)}
    repository = repository_of(base)
    text = _TEMPLATE.format(
        run=run_dir.resolve().name,
        step=step,
        base=repository or base.name,
        base_model=f"base_model: {repository}\n" if repository else "",
        digest=settings_digest(settings),
        metrics="".join(f"| {name} | {_number(value)} | {at} |\n" for name, (value, at) in sorted(latest.items())),
    )
    (directory / CARD).write_text(text, encoding="utf-8")


def name_model(directory: Path, name: str) -> None:
    """Lets the card of a model's directory load it under this name."""
    card = directory / CARD
    card.write_text(card.read_text(encoding="utf-8").replace(_PLACE, name), encoding="utf-8")


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else "not finite"
