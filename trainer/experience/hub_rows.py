"""The data set of a hub's environment, as files that a run reads like any others."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.experience.hub import SPLITS
from trainer.experience.programs.hub import HubProcess
from trainer.records.files.atomic import atomic_file

logger = logging.getLogger(__name__)


def with_hub_rows(config: Config) -> Config:
    """The settings with the rows of the hub's environment as training and held-out files.

    The files lie in `environments/` of `trainer.output_dir`, under the SHA-256 of their content: a resumed run finds
    the rows that it knows, or is refused like any run whose data changed. Raises ConfigError if the environment cannot
    be opened or has no rows, or if the settings name other files.
    """
    environment, data = config.rollout.environment, config.data
    if environment.hub is None:
        return config
    process = HubProcess(environment, config.rollout.environment_timeout)
    try:
        rows = {split: _rows(environment.hub, split, process.tasks(split)) for split in SPLITS}
    finally:
        process.close()
    files = {f"{split}_files": [_written(config.trainer.output_dir, split, rows[split])] for split in SPLITS}
    for name, (written,) in files.items():
        others = [
            path for path in getattr(data, name) if path.name != written.name
        ]  # a replay names the rows themselves
        if others or data.custom_cls.path is not None:
            other = f"data.{name}={others[0]}" if others else "data.custom_cls"
            raise ConfigError(
                f"rollout.environment={environment.hub} has its own data set, and {other} is another",
                hint=f"leave out data.{name} and data.custom_cls",
            )
    return config.model_copy(update={"data": data.model_copy(update=files)})


def _rows(hub: str, split: str, tasks: list[dict[str, Any]]) -> str:
    """The rows as JSON Lines."""
    rows = [
        {
            "data_source": hub,
            "prompt": task["prompt"],
            "reward_model": {"ground_truth": task["ground_truth"]},
            "extra_info": {"split": split, "row": number},
        }
        for number, task in enumerate(tasks)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def _written(output_dir: Path, split: str, content: str) -> Path:
    path = output_dir / "environments" / f"{split}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.jsonl"
    if not path.is_file():
        with atomic_file(path) as temporary:
            temporary.write_text(content)
    logger.info("%s: %d rows of the environment", path, content.count("\n"))
    return path
