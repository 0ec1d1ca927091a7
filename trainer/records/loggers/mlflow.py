"""MLflow. MLFLOW_TRACKING_URI says where the metrics go; without it, to `mlruns` beside the run's directory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.compat.hydra import flattened
from trainer.errors import ConfigError
from trainer.records.logger import LoggerRow, load_package


class MlflowLogger:
    def __init__(self, run_dir: Path, project: str, settings: Mapping[str, Any]) -> None:
        self._mlflow = load_package("mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # MLflow's own default is a database in the working directory, for which the image has no driver.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self._mlflow.set_tracking_uri((run_dir.absolute().parent / "mlruns").as_uri())
        try:
            self._mlflow.set_experiment(project)
            self._run = self._mlflow.start_run(run_name=run_dir.name).info.run_id
            self._mlflow.log_params(flattened("", settings))
        except self._mlflow.MlflowException as error:
            raise ConfigError(
                f"trainer.loggers names mlflow, which cannot start: {error}",
                hint="correct MLFLOW_TRACKING_URI, or unset it to record into a folder",
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # By its id: another thread does not know which run is active.
        self._mlflow.log_metrics(dict(metrics), step=step, run_id=self._run)

    def close(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


ROW = LoggerRow(name="mlflow", open=MlflowLogger)
