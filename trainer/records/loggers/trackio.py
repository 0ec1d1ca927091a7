"""Trackio. TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say where the metrics go; without them, to `trackio` beside the run's
directory, which `TRACKIO_DIR=… trackio show` displays."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.records.logger import LoggerRow, answers, load_package


class TrackioLogger:
    def __init__(self, run_dir: Path, project: str, settings: Mapping[str, Any]) -> None:
        # Trackio reads it when it is imported; its own default is the cache of the Hub, which containers may not keep.
        os.environ.setdefault("TRACKIO_DIR", str(run_dir.absolute().parent / "trackio"))
        self._trackio = load_package("trackio")
        try:
            if os.environ.get("TRACKIO_SPACE_ID"):
                hub = load_package("huggingface_hub.constants").ENDPOINT
                if not answers(hub):
                    raise ConnectionError(f"nothing answers at {hub}")
            self._run = self._trackio.init(
                project=project,
                name=run_dir.name,
                config=dict(settings),
                resume="allow",  # a resumed run continues the same record
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except (ValueError, OSError) as error:  # those of the Hub's client are of both kinds
            raise ConfigError(
                f"trainer.loggers names trackio, which cannot start: {error}",
                hint="correct TRACKIO_SPACE_ID, TRACKIO_SERVER_URL or HF_TOKEN, or unset them to record into a folder",
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        if failed:  # Trackio has no status of a run
            self._run.alert("the run failed", level=self._trackio.AlertLevel.ERROR)
        self._run.finish()


ROW = LoggerRow(name="trackio", open=TrackioLogger)
