"""The trainer's errors: what failed, where, how to fix it. The command line prints them once, without a traceback."""


class TrainerError(Exception):
    """Base class. `hint` says how to fix it; `exit_code` is what the command line exits with."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(TrainerError):
    """A setting is unknown, of the wrong type, or impossible together with another."""

    exit_code = 2


class DataError(TrainerError):
    """A data or model file is missing, unreadable, or lacks what is needed."""

    exit_code = 3


class CheckpointError(TrainerError):
    """A checkpoint cannot be written, is damaged, or belongs to another model."""

    exit_code = 4


class WorkerError(TrainerError):
    """A training or rollout worker failed while the run was going on."""

    exit_code = 5


class RewardError(TrainerError):
    """A reward function returned something that is no reward."""

    exit_code = 6


class WatchdogError(TrainerError):
    """A watchdog whose action is `stop` has rung."""

    exit_code = 7


class InterruptedRun(TrainerError):  # noqa: N818 - nothing went wrong
    """The run was told to stop (SIGTERM) and has put its state in safety."""

    exit_code = 143
