"""The trainer's errors. A message says what failed and where; the command line prints it without a traceback."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class TrainerError(Exception):
    """Base class. `hint` says how to fix the error; the command line exits with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(TrainerError):
    """A setting is unknown, has the wrong type, or contradicts another."""

    exit_code = 2


class UnusableSettingsError(ConfigError):
    """Several settings that cannot be used."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        lines = [f"\n  {problem}" + (f" ({problem.hint})" if problem.hint else "") for problem in problems]
        super().__init__(f"{len(problems)} settings cannot be used:" + "".join(lines))
        self.problems = problems


class LostRunError(ConfigError):
    """Another process took the run's directory."""


class MissingPackageError(TrainerError):
    """A Python package is not installed here."""

    exit_code = 2


class DataError(TrainerError):
    """A data or model file is missing, unreadable or incomplete."""

    exit_code = 3


class CheckpointError(TrainerError):
    """A checkpoint cannot be written, is damaged, or belongs to another model."""

    exit_code = 4


class RemovedRunError(TrainerError):
    """The run's directory was removed, moved or emptied while the run wrote into it."""

    exit_code = 4


class CertificateError(TrainerError):
    """A run has no readable certificate. `verify` and `replay` also exit with 1 if they find a difference."""


class WorkerError(TrainerError):
    """A training or rollout worker failed during a run."""

    exit_code = 5


class NoAnswerError(WorkerError):
    """A worker did not answer in time; it may still be at work."""


@dataclass(frozen=True)
class LoweredLimit:
    """A setting that limits micro-batches, its value when a GPU's memory was full, and the value to try next."""

    setting: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.setting}={self.after} instead of {self.before}"


class RestartError(WorkerError):
    """New workers can continue the run from `checkpoint`, its last one, which is set once its steps have ended."""

    checkpoint: Path | None = None


class MemoryFullError(RestartError):
    """A GPU's memory was full in a training pass, and smaller micro-batches did not help.

    `lowered` may help where it is not None.
    """

    def __init__(self, message: str, hint: str = "", lowered: LoweredLimit | None = None) -> None:
        super().__init__(message, hint)
        self.lowered = lowered


class LostRankError(RestartError):
    """A rank died, and the copies of the trained roles in memory are not complete or cannot be used."""


class RewardError(TrainerError):
    """A reward function returned an invalid reward, or failed for all of the first responses."""

    exit_code = 6


class FailedResponsesError(TrainerError):
    """More responses of a step failed than `rollout.max_failed_share` or `reward.max_failed_share` allows."""

    exit_code = 6


class WatchdogError(TrainerError):
    """A watchdog with the action `stop` raised an alarm."""

    exit_code = 7


class OutputError(TrainerError):
    """Standard output cannot be written."""


class InterruptedRun(TrainerError):  # noqa: N818 - nothing went wrong
    """The run received SIGTERM (128+n: signal n, such as 129 for SIGHUP) and saved its state."""

    exit_code = 143

    def __init__(self, number: signal.Signals, when: str = "", hint: str = "") -> None:
        super().__init__(f"stopped by {number.name}{when}", hint)
        self.number = number
        self.exit_code = 128 + number
