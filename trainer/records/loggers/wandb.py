"""Weights & Biases. WANDB_MODE, WANDB_BASE_URL … say where the metrics go."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.records.logger import LoggerRow, load_package


class WandbLogger:
    def __init__(self, run_dir: Path, project: str, settings: Mapping[str, Any]) -> None:
        self._run = load_package("wandb").init(
            project=project,
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(settings),
            # A resumed run continues the same record.
            id=run_dir.name,
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


ROW = LoggerRow(name="wandb", open=WandbLogger)
