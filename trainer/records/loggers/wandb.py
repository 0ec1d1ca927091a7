"""Weights & Biases. WANDB_MODE, WANDB_BASE_URL … say where the metrics go; without a key or a server, to a folder."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.records.logger import LoggerRow, answers, load_package

logger = logging.getLogger(__name__)


class WandbLogger:
    def __init__(self, run_dir: Path, project: str, settings: Mapping[str, Any]) -> None:
        wandb = load_package("wandb")
        try:
            reason = _offline_reason(wandb)
            if reason:
                logger.warning(
                    "wandb: %s, so the run is recorded offline; upload it with `wandb sync %s/wandb/offline-run-*`",
                    reason,
                    run_dir,
                )
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                dir=str(run_dir),
                config=dict(settings),
                # A resumed run continues the same record.
                id=run_dir.name,
                resume="allow",
                mode="offline" if reason else None,
            )
        except wandb.Error as error:
            raise ConfigError(
                f"trainer.loggers names wandb, which cannot start: {error}",
                hint="correct WANDB_API_KEY or WANDB_BASE_URL, or set WANDB_MODE=offline",
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _offline_reason(wandb: Any) -> str:
    """Why the run cannot be recorded online; empty if it can, or if the user chose another mode."""
    settings = wandb.setup().settings
    if settings.mode != "online":
        return ""
    if not answers(settings.base_url):
        return f"nothing answers at {settings.base_url}"
    return "" if wandb.login(prompt=False) else "no API key is set"


ROW = LoggerRow(name="wandb", open=WandbLogger)
