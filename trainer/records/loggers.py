"""Metrics for Weights & Biases and MLflow, where their packages are installed; the image holds neither.

Where they send to is up to their own variables (WANDB_MODE, WANDB_BASE_URL, MLFLOW_TRACKING_URI …).
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.config.tree import RunConfig
from trainer.errors import ConfigError


class MetricsLogger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step."""

    def close(self, failed: bool) -> None:
        """Ends the record."""


class WandbLogger:
    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        wandb = _package("wandb", "wandb")
        self._run = wandb.init(
            project=config.trainer.project_name,
            name=run_dir.name,
            dir=str(run_dir),
            config=config.model_dump(mode="json"),
            # A resumed run goes on in the same record.
            id=run_dir.name,
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowLogger:
    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._mlflow = _package("mlflow", "mlflow")
        self._mlflow.set_experiment(config.trainer.project_name)
        self._mlflow.start_run(run_name=run_dir.name)
        self._mlflow.log_params(dict(_flat(config.model_dump(mode="json"), "")))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


_LOGGERS: dict[str, Callable[[Path, RunConfig], MetricsLogger]] = {"wandb": WandbLogger, "mlflow": MlflowLogger}


def open_loggers(names: Sequence[str], run_dir: Path, config: RunConfig) -> list[MetricsLogger]:
    """The loggers of these names. Raises ConfigError if a package is missing."""
    return [_LOGGERS[name](run_dir, config) for name in names]


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.loggers names {module}, which is not installed: {error}",
            hint=f"pip install {package} where the run is started, or leave it out of trainer.loggers",
        ) from error


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
