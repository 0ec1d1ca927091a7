"""The trainer from Python, in a notebook or a program. Imports torch, Ray and vLLM when a run starts, not before."""

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, TrainerError
from trainer.packages import explained

if TYPE_CHECKING:
    from trainer.config.tree import Config
    from trainer.records.files.records import MetricsRow, SampleRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The results of a run, read from its directory, like `runs/20260101T120000Z`.

    The attributes raise DataError or CheckpointError for files that are damaged.
    """

    directory: Path

    @property
    def metrics(self) -> "list[MetricsRow]":
        """A row per step: `step`, and the value of each metric by its name."""
        from trainer.records.files.records import METRICS, METRICS_ROWS, read_records

        return read_records(self.directory / METRICS, METRICS_ROWS, logger.warning)

    @property
    def samples(self) -> "list[SampleRow]":
        """Some responses of each step: `step`, `prompt`, `response`, `ground_truth` and `reward`."""
        from trainer.records.files.records import SAMPLE_ROWS, SAMPLES, read_records

        return read_records(self.directory / SAMPLES, SAMPLE_ROWS, logger.warning)

    @property
    def checkpoint(self) -> Path | None:
        """The last whole checkpoint, which `trainer.resume` continues from; None without one."""
        from trainer.runs.checkpoints.checkpoint import last_checkpoint

        return last_checkpoint(*self._directories())

    @property
    def model(self) -> Path | None:
        """The final policy, a directory that Transformers and vLLM load; None if the run has not taken all steps."""
        models = (directory / "model" for directory in self._directories())
        return next((model for model in models if model.is_dir()), None)

    def _directories(self) -> list[Path]:
        """Where checkpoints and model may lie."""
        from trainer.records.files.run_files import read_settings

        spare = read_settings(self.directory).get("trainer", {}).get("spare_dir")
        return [self.directory, *([Path(spare) / self.directory.name] if spare else [])]


def train(config: "Config | Mapping[str, Any]", *, reward: Callable[..., Any] | None = None) -> Run:
    """Trains a policy, like `python -m trainer train`, and returns the run once all steps are taken.

    `config` holds the settings: a `trainer.config.tree.Config`, or a mapping with what a YAML file may hold, such as
    `{"model.path": "Qwen/Qwen2.5-0.5B", "actor": {"lora": {"rank": 16}}, "defaults": ["grpo"]}`; `defaults` are
    presets.

    `reward(data_source, solution_str, ground_truth, extra_info)` scores a response: it returns a number, or a mapping
    with one under `score`. It may be defined anywhere, and runs in processes of its own. The run keeps its code and the
    variables that it reads, at most 1 MiB.

    The run uses the Ray cluster at RAY_ADDRESS, or one on this machine that ends with it. An interrupt (SIGINT) ends
    the run after its current step, with a checkpoint; a second one ends it at once. Another run can follow in the same
    process.

    Raises TrainerError for every problem that the user can fix, like ConfigError for settings and DataError for data
    and models; InterruptedRun after an interrupt.
    """
    with _explained():
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "trainer.train: called in a thread, where no signal can end the run",
                hint="call it in the main thread, as a cell of a notebook does",
            )
        settings = _settings(config, reward)
        from trainer.cluster.garbage import without_collections

        with without_collections():
            from trainer.records.pages.report import write_report
            from trainer.runs.ppo import train as run
        try:
            directory = run(settings)
        finally:
            gc.unfreeze()  # what the run froze is the caller's again
        write_report(directory)
        return Run(directory)


def _settings(config: "Config | Mapping[str, Any]", reward: Callable[..., Any] | None) -> "Config":
    from trainer.compat.settings import load_config
    from trainer.config.pickled_code import pickled
    from trainer.config.tree import Config

    if isinstance(config, Config) and reward is None:
        return config
    given = config.model_dump(exclude_unset=True) if isinstance(config, Config) else config
    function = {} if reward is None else {"reward.custom_function.pickled": pickled("trainer.train: reward", reward)}
    settings: Config
    settings, notes = load_config([given, function], [], Config)
    for note in notes:
        logger.warning("warning: %s", note)
    return settings


@contextmanager
def _explained() -> Iterator[None]:
    """Errors inside show their hint in a traceback; a missing package names the image."""
    try:
        try:
            yield
        except ModuleNotFoundError as error:
            raise explained(error, "trainer.train", "python PROGRAM.py") from error
    except TrainerError as error:
        if error.hint:
            error.add_note(f"hint: {error.hint}")
        raise
