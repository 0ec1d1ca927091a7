"""Settings of the run itself: nodes, steps, checkpoints, validation, loggers, profiler."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, field_validator, model_validator

from trainer.config.section import AbsolutePath, Section
from trainer.errors import ConfigError
from trainer.rows import Row, find_rows

if TYPE_CHECKING:
    LoggerName = str
else:
    LoggerName = Literal[tuple(find_rows("trainer.records.loggers", Row))]


SAVE_MINUTES = 15.0  # between checkpoints, if nothing else is set
_SHOWN = 5  # names of directories in an error


class ProfilerConfig(Section):
    enable: bool = Field(False, description="write torch traces of some steps and warn about slow phases")
    dir: AbsolutePath | None = Field(
        None, description="directory of the traces, one file per step, role and rank; RUN/traces when not given"
    )
    steps: list[int] = Field([2], description="steps to trace; the first step is not representative")
    actor_forward_ms: float | None = Field(
        None,
        gt=0,
        description="warn when old_log_prob takes longer, in ms; null: twice the run's median",
    )
    critic_update_ms: float | None = Field(
        None,
        gt=0,
        description="warn when update_critic takes longer, in ms; null: twice the run's median",
    )
    loading_ms: float | None = Field(
        None,
        gt=0,
        description="warn when loading a batch of prompts takes longer, in ms; null: twice the run's median",
    )


class TrajectoriesConfig(Section):
    freq: int = Field(
        1, ge=0, description="steps between files with all responses of a step; 0: none, nor of validations"
    )
    dir: AbsolutePath | None = Field(None, description="directory of these files; RUN/trajectories when not given")
    validation_dir: AbsolutePath | None = Field(
        None, description="directory of a file per validation; RUN/validations when not given"
    )
    per_token: bool = Field(False, description="also record token ids, log-probs and advantages of every token")


class TrainerConfig(Section):
    output_dir: AbsolutePath = Field(Path("runs"), description="parent directory of the run's directory")
    run_id: str | None = Field(
        None, min_length=1, description="name of the run's directory; the start time when not given"
    )
    nnodes: int | None = Field(None, gt=0, description="nodes to use; all nodes of the cluster when not given")
    n_gpus_per_node: int | None = Field(None, ge=0, description="GPUs per node; what Ray reports when not given")
    mode: Literal["synchronous", "one_step_off", "asynchronous"] = Field(
        "synchronous",
        description="synchronous: sample, then train; one_step_off: sample for the next step while the actor trains on "
        "this one; asynchronous: sample continuously, and continue unfinished responses under new weights",
    )
    max_staleness: float = Field(
        1,
        ge=0,
        description="asynchronous: largest age, in updates, of the weights that sampled a token; 0.5: one update, for "
        "half of a step's prompts",
    )
    project_name: str = Field("slipway", description="project under which loggers record the run")
    loggers: list[LoggerName] = Field(
        [], description="loggers besides console, metrics.jsonl and TensorBoard: trainer/records/loggers/"
    )
    total_steps: int | None = Field(None, gt=0, description="steps to train; overrides total_epochs")
    total_epochs: int = Field(1, gt=0, description="passes over the training prompts")
    stop_after_epochs: bool = Field(
        False, description="end after total_epochs even if total_steps is larger; schedules still span total_steps"
    )
    save_freq: int = Field(
        -1,
        ge=-1,
        description="steps between checkpoints; -1: by time and at the end; 0: none. Unless 0, a run that fails saves "
        "its last finished step",
    )
    save_minutes: float | None = Field(
        None,
        ge=0,
        description="minutes between checkpoints; 0: none by time; when not given, 15 with save_freq=-1, else 0",
    )
    spare_dir: AbsolutePath | None = Field(
        None, description="directory for checkpoints and the model when output_dir cannot be written; shared like it"
    )
    keep_checkpoints: int | None = Field(
        None,
        gt=0,
        description="number of latest checkpoints to keep; all when not given; up to three more to roll back to",
    )
    test_before_training: bool = Field(True, description="validate before the first step")
    critic_warmup: int = Field(0, ge=0, description="steps at the start that train only the critic")
    validate_only: bool = Field(False, description="validate the model, or the checkpoint of resume, and end")
    test_freq: int = Field(
        5, description="steps between validations; -1 or false: before the first and after the last step only"
    )
    stop_at: float | None = Field(None, description="end early once validation/exact_match reaches this")
    redundancy: int = Field(
        0,
        ge=0,
        le=1,
        description="copies of weights and optimizer states in another node's memory, renewed after each step. 1: a "
        "rank that dies restarts from them without losing a step",
    )
    resume: Literal["auto"] | AbsolutePath | None = Field(
        None,
        description="checkpoint directory to continue from; auto: the last one of output_dir/run_id, or a new run",
    )
    seed: int = Field(0, description="seed of the prompt order and of sampling")
    deterministic: bool = Field(
        False,
        description="on GPUs, use only kernels with a fixed order of sums and sample each response independently of "
        "its batch: the same run on the same kind of GPU gives the same weights to the bit, more slowly. "
        "Conversations take their turns together",
    )
    profiler: ProfilerConfig = ProfilerConfig()
    trajectories: TrajectoriesConfig = TrajectoriesConfig()
    bind_cores: bool = Field(
        True, description="pin the processes of a GPU to the CPU cores near it, or else to an equal share of all cores"
    )
    worker_timeout: float = Field(300.0, gt=0, description="timeout of a single call to a worker, in seconds")
    stall_seconds: float = Field(
        60.0,
        gt=0,
        description="a call to workers is a hang after this many seconds and three times the longest earlier call; the"
        " log and stall.html then explain it",
    )
    on_stall: Literal["continue", "end"] = Field(
        "continue",
        description="after a hang. continue: wait until worker_timeout; end: replace an engine at once; for any other "
        "worker save and end the run",
    )

    @field_validator("test_freq", mode="before")
    @classmethod
    def _false_is_never(cls, given: object) -> object:
        return -1 if str(given).lower() == "false" else given

    @property
    def resumes_itself(self) -> bool:
        """Whether the run continues from its own last checkpoint, so that a scheduler can restart it."""
        return self.resume == "auto"

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint to continue from, if `resume` names one."""
        return None if self.resume == "auto" else self.resume

    def check_resume(self) -> None:
        """Raises ConfigError if `resume` names a directory that does not exist, or that of a run."""
        if self.checkpoint is None:
            return
        if (self.checkpoint / "checkpoints").is_dir():
            raise ConfigError(
                f"trainer.resume={self.checkpoint}: the directory of a run, not a checkpoint",
                hint=f"set trainer.resume=auto trainer.run_id={self.checkpoint.name}, or name one of its checkpoints",
            )
        if self.checkpoint.is_dir():
            return
        parent = next(folder for folder in self.checkpoint.parents if folder.is_dir())
        beside = sorted(path.name for path in parent.iterdir() if path.is_dir())[-_SHOWN:]
        raise ConfigError(
            f"trainer.resume={self.checkpoint}: no such directory",
            hint="name a checkpoint, like runs/ID/checkpoints/step_000010"
            + (f"; {parent} has {', '.join(beside)}" if beside and parent != Path("/") else ""),
        )

    @property
    def minutes_between_saves(self) -> float:
        """Minutes between checkpoints by time; 0 if there are none."""
        if self.save_minutes is None:
            return SAVE_MINUTES if self.save_freq == -1 else 0.0
        return self.save_minutes

    @model_validator(mode="after")
    def _good_enough_is_measured(self) -> Self:
        if self.stop_at is not None and self.test_freq < 1:
            raise ValueError(f"trainer.stop_at={self.stop_at:g} needs validations between steps: set trainer.test_freq")
        return self

    @model_validator(mode="after")
    def _never_is_never(self) -> Self:
        if self.save_freq == 0 and self.save_minutes:
            raise ValueError(f"trainer.save_freq=0 never saves, but save_minutes={self.save_minutes:g} is given")
        return self

    @model_validator(mode="after")
    def _copies_belong_to_a_step(self) -> Self:
        if self.redundancy and self.mode == "asynchronous":
            raise ValueError(
                "trainer.redundancy=1 does not work with mode=asynchronous, whose engines continue responses under new "
                "weights, so that a step cannot be repeated; set mode=one_step_off, or redundancy=0"
            )
        return self

    @model_validator(mode="after")
    def _a_run_that_resumes_itself_has_a_name(self) -> Self:
        if self.resumes_itself and self.run_id is None:
            raise ValueError("trainer.resume=auto needs trainer.run_id, whose checkpoints it continues")
        return self
