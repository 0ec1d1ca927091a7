"""The interface of loggers, which receive each step's metrics besides console, metrics.jsonl and TensorBoard."""

import importlib
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import ConfigError
from trainer.rows import Row


class MetricsLogger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step."""

    def close(self, failed: bool) -> None:
        """Ends the record."""


@dataclass(frozen=True, kw_only=True)
class LoggerRow(Row):
    """A logger in `trainer/records/loggers/`.

    `open(run_dir, project, settings)` starts the record of a run, whose name is that of its directory; `settings` is
    the whole configuration as JSON values. A logger that needs a package loads it with `load_package`.
    """

    open: Callable[[Path, str, Mapping[str, Any]], MetricsLogger]


ANSWER_SECONDS = 5.0


def answers(address: str) -> bool:
    """Whether an HTTP server answers at this address, with any status, through the proxies of the environment."""
    try:
        with urllib.request.urlopen(address, timeout=ANSWER_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


def load_package(name: str) -> Any:
    """The module of a package that other installations may lack. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"trainer.loggers names {name}, which is not installed: {error}",
            hint=f"pip install {name} where the run is started, or remove it from trainer.loggers",
        ) from error
