"""The records of a running run: metrics, samples, TensorBoard, and progress on the console."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter

from trainer.background import ended_within
from trainer.config.tree import RunConfig
from trainer.errors import CheckpointError, ConfigError
from trainer.records.console import RUN_COLUMNS, Column, Progress, progress
from trainer.records.files.atomic import atomic_file
from trainer.records.files.lines import LineFile
from trainer.records.files.record_thread import RecordThread
from trainer.records.files.records import (
    CONFIG,
    METRICS,
    METRICS_ROWS,
    PHASE,
    SAMPLE_ROWS,
    SAMPLES,
    WAITS,
    WAITS_ROWS,
    left_out,
    lines,
)
from trainer.records.files.regular import open_regular
from trainer.records.logger import LoggerRow
from trainer.records.retrying import RetryingLogger
from trainer.records.tensorboard import TensorBoardFile
from trainer.rows import find_rows

logger = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"
_OVERWRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
CLOSE_SECONDS = 300.0  # for records that a slow disk has not taken yet
INTERRUPTED = "trainer/interrupted"  # a metric of the last step of a run that failed in it, after its update

Opened = TypeVar("Opened", LineFile, TensorBoardFile)


@dataclass(frozen=True)
class Sample:
    """One response of the policy and its reward."""

    prompt: str
    response: str
    ground_truth: str
    reward: float


class Tracker:
    """Records a run in its directory and shows it on the console; a context manager. Files are written in a thread.

    A new run needs a directory without metrics. A resumed run passes its last step (-1 if it repeats all steps).

    Raises ConfigError if a new run would mix with an old one.
    """

    def __init__(
        self, run_dir: Path, config: RunConfig, resumed_step: int | None = None, columns: Sequence[Column] = RUN_COLUMNS
    ) -> None:
        metrics = run_dir / METRICS
        if resumed_step is None and metrics.exists() and metrics.stat().st_size:
            raise ConfigError(
                f"{run_dir} contains the metrics of another run",
                hint="set another trainer.run_id, or continue that run with trainer.resume=CHECKPOINT",
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        settings = config.model_dump(mode="json")
        loggers = find_rows("trainer.records.loggers", LoggerRow)
        self._loggers = [
            RetryingLogger(name, loggers[name].open(run_dir, config.trainer.project_name, settings))
            for name in config.trainer.loggers
        ]
        self._run_dir, self._config, self._resumed_step = run_dir, config, resumed_step
        self._opened: list[LineFile | TensorBoardFile] = []
        self._progress: Progress = progress(0, max(0, resumed_step or 0), columns)
        self._seconds: dict[str, float] = {}
        self._phase, self._total_steps = run_dir / PHASE, 0
        self._thread = RecordThread("records")
        self._flush_others: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def begin(self) -> None:
        """Opens the files. Records after the resumed step are removed, so that each step is recorded once.

        Before it, nothing that an earlier part of the run has recorded is changed. Raises CheckpointError.
        """
        files: dict[str, TypeAdapter[Any]] = {METRICS: METRICS_ROWS, SAMPLES: SAMPLE_ROWS, WAITS: WAITS_ROWS}
        try:
            if self._resumed_step is not None:
                for name, kind in files.items():
                    _cut(self._run_dir / name, kind, self._resumed_step)
            with atomic_file(self._run_dir / CONFIG) as temporary:
                temporary.write_text(self._config.model_dump_json(indent=2) + "\n")
            self._metrics, self._samples, self._waits = (self._keep(LineFile(self._run_dir / name)) for name in files)
            self._tensorboard = self._keep(TensorBoardFile(self._run_dir / TENSORBOARD, self._resumed_step))
        except OSError as error:
            raise CheckpointError(
                f"{self._run_dir}: the run's records cannot be written: {error}",
                hint="make room on the disk, or set another trainer.output_dir",
            ) from error

    def _keep(self, file: Opened) -> Opened:
        self._opened.append(file)
        return file

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)
        for sender in self._loggers:
            sender.close(failed=error is not None)
        ended_within(CLOSE_SECONDS, self._close_files, f"records in {self._run_dir}")

    def _close_files(self) -> None:
        self._thread.close()
        for file in reversed(self._opened):
            file.close()

    def expect(self, total_steps: int) -> None:
        """Sets the number of steps on the console."""
        self._total_steps = total_steps
        self._progress.expect(total_steps)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows the phase and times it. The next `log` records the seconds as `time/<name>`, summed if it repeats."""
        started = time.perf_counter()
        self._progress.phase(name)
        now = {"phase": name, "since": time.time(), "total_steps": self._total_steps}
        self._thread.put(partial(self._write_phase, json.dumps(now) + "\n"))
        try:
            yield
        finally:
            key = f"time/{name}"
            self._seconds[key] = self._seconds.get(key, 0.0) + time.perf_counter() - started

    @property
    def seconds(self) -> Mapping[str, float]:
        """The seconds of each phase since the last `log`, by `time/<name>`."""
        return self._seconds

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step, with the phases timed since the last call."""
        row = {**self._seconds, **{name: float(value) for name, value in metrics.items()}}
        self._seconds.clear()
        self._thread.put(partial(self._metrics.append, {"step": step, "wall_time": time.time(), **row}))
        self._thread.put(partial(self._tensorboard.log, step, row))
        for logger in self._loggers:
            logger.log(step, row)
        self._progress.step(step, row)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Records responses of a step."""
        for sample in samples:
            self._thread.put(partial(self._samples.append, {"step": step, **asdict(sample)}))

    def log_waits(self, step: int, waits: Mapping[str, tuple[float, str]]) -> None:
        """Records how long the workers of each role waited for the slowest of them in a step, and for which one."""
        rows = {role: {"seconds": seconds, "slowest": worker} for role, (seconds, worker) in waits.items()}
        self._thread.put(partial(self._waits.append, {"step": step, "waits": rows}))

    def flush(self) -> None:
        """Waits until everything recorded so far is in the files, including the records of `flush_too`."""
        self._thread.flush()
        for flush in self._flush_others:
            flush()

    def flush_too(self, flush: Callable[[], object]) -> None:
        """Has every later `flush` also wait for other records of the run, which are written in their own threads."""
        self._flush_others.append(flush)

    def _write_phase(self, line: str) -> None:
        with suppress(OSError), os.fdopen(open_regular(self._phase, _OVERWRITE), "w") as file:
            file.write(line)  # only `trainer top` reads it


def _cut(path: Path, kind: TypeAdapter[Any], last_step: int) -> None:
    """Removes what was recorded after `last_step`. What is no record stays where it is, and a warning names it."""
    if not path.exists():
        return
    complaints: list[str] = []
    between: list[bytes] = []  # no records, until one follows that is kept
    with atomic_file(path) as temporary, temporary.open("wb") as kept:
        for line in lines(path, kind):
            if line.row is None:
                complaints.append(line.complaint)
                between.append(line.text)
            elif line.row["step"] <= last_step:
                kept.writelines([*between, line.text])
                between.clear()
    if complaints:
        logger.warning("%s", left_out(path, complaints))
