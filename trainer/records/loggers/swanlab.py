"""SwanLab. SWANLAB_MODE, SWANLAB_API_HOST … say where the metrics go; without a key or a server, to a folder."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.records.logger import LoggerRow, answers, load_package

logger = logging.getLogger(__name__)


class SwanlabLogger:
    def __init__(self, run_dir: Path, project: str, settings: Mapping[str, Any]) -> None:
        swanlab = load_package("swanlab")
        reason = _offline_reason(swanlab)
        directory = run_dir / "swanlab"
        if reason:
            logger.warning(
                "swanlab: %s, so the run is recorded offline; upload it with `swanlab sync %s/run-*`", reason, directory
            )
        try:
            self._run = swanlab.init(
                project=project,
                name=run_dir.name,
                log_dir=str(directory),
                config=dict(settings),
                mode="offline" if reason else None,
            )
        except (RuntimeError, swanlab.exceptions.AuthenticationError) as error:
            raise ConfigError(
                f"trainer.loggers names swanlab, which cannot start: {error}",
                hint="correct SWANLAB_API_KEY or SWANLAB_API_HOST, or set SWANLAB_MODE=offline",
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success")


def _offline_reason(swanlab: Any) -> str:
    """Why the run cannot be recorded online; empty if it can, or if the user chose another mode."""
    settings = swanlab.Settings()
    if settings.mode != "online":
        return ""
    if settings.api_key is None:
        return "no API key is set"
    return "" if answers(settings.api_host) else f"nothing answers at {settings.api_host}"


ROW = LoggerRow(name="swanlab", open=SwanlabLogger)
