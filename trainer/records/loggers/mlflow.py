"""MLflow. MLFLOW_TRACKING_URI says where the metrics go; without it, to `mlruns` beside the run's directory."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.config.hydra import flattened
from trainer.errors import ConfigError
from trainer.records.logger import LoggerRow, answers, load_package

logger = logging.getLogger(__name__)


class MlflowLogger:
    def __init__(self, run_dir: Path, project: str, settings: Mapping[str, Any]) -> None:
        self._mlflow = load_package("mlflow")
        self._server = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not self._server:
            # MLflow's own default is a database in the working directory, for which the image has no driver.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self._server = (run_dir.absolute().parent / "mlruns").as_uri()
        self._mlflow.set_tracking_uri(self._server)
        self._project, self._name, self._settings = project, run_dir.name, settings
        self._run: str | None = None
        address = urlsplit(self._server)
        if address.scheme in ("http", "https") and address.hostname and not answers(self._server):
            logger.warning("mlflow: nothing answers at %s; steps wait in memory until it does", self._server)
            return
        try:
            self._start()
        except self._mlflow.MlflowException as error:
            raise ConfigError(
                f"trainer.loggers names mlflow, which cannot start: {error}",
                hint="correct MLFLOW_TRACKING_URI, or unset it to record into a folder",
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises ConnectionError or MlflowException while the server is away."""
        if self._run is None:
            if not answers(self._server):  # MLflow's own attempts take minutes
                raise ConnectionError(f"nothing answers at {self._server}")
            self._start()
        # By its id: another thread does not know which run is active.
        self._mlflow.log_metrics(dict(metrics), step=step, run_id=self._run)

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._mlflow.MlflowClient().set_terminated(self._run, "FAILED" if failed else "FINISHED")

    def _start(self) -> None:
        # By the client: what `mlflow.start_run` starts belongs to the thread that called it.
        experiment = self._mlflow.set_experiment(self._project).experiment_id
        tags = load_package("mlflow.tracking.context.registry").resolve_tags()
        run = self._mlflow.MlflowClient().create_run(experiment, run_name=self._name, tags=tags).info.run_id
        self._mlflow.log_params(flattened("", self._settings), run_id=run)
        self._run = run


ROW = LoggerRow(name="mlflow", open=MlflowLogger)
