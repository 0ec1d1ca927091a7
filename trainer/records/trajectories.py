"""Every response of a run in Parquet: a file per step and per validation, written beside the training."""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from trainer.config.sections.trainer import TrajectoriesConfig
from trainer.errors import DataError
from trainer.records.files.atomic import atomic_file
from trainer.records.files.record_thread import RecordThread
from trainer.records.files.regular import open_regular
from trainer.records.printable import printable

logger = logging.getLogger(__name__)

FOLDER, VALIDATIONS = "trajectories", "validations"
_TEXT, _NUMBERS = pa.string(), pa.list_(pa.float32())
SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "prompt_index": pa.int64(),  # its position in the data
        "data_source": _TEXT,
        "prompt": _TEXT,
        "response": _TEXT,
        "ground_truth": _TEXT,  # JSON unless it is text
        "reward": pa.float32(),  # NaN: the response failed and has none
        "scores": _TEXT,  # JSON: the parts of the reward by name, if it has any
        "tokens": pa.int64(),
        # With trainer.trajectories.per_token, an entry per token of the response; otherwise null.
        "token_ids": pa.list_(pa.int32()),
        "log_probs": _NUMBERS,  # of the policy that the update starts from, or of the engines if only they are known
        "advantages": _NUMBERS,
    }
)
_GIVEN = ("step", "data_source", "prompt", "response", "ground_truth", "reward", "tokens")
_NAME = re.compile(r"step_([0-9]{6}|[1-9][0-9]{6,17})\.parquet")
_SCORES: TypeAdapter[dict[str, float | None]] = TypeAdapter(dict[str, float | None])
Row = Mapping[str, Any]


class TrajectoryRow(TypedDict):
    """A row of a file, without the entries per token."""

    step: int
    prompt_index: int | None
    data_source: str
    prompt: str
    response: str
    ground_truth: str
    reward: float
    scores: str | None
    tokens: int


def trajectories_directory(run_dir: Path, settings: TrajectoriesConfig) -> Path:
    return settings.dir or run_dir / FOLDER


def validations_directory(run_dir: Path, settings: TrajectoriesConfig) -> Path:
    return settings.validation_dir or run_dir / VALIDATIONS


class TrajectoryWriter:
    """Writes one file per step: a thread makes its content, another brings it to the disk, which may be slow. A file
    that cannot be written only costs a warning."""

    def __init__(self, directory: Path, settings: TrajectoriesConfig) -> None:
        self._directory, self._freq = directory, settings.freq
        self._making = ThreadPoolExecutor(1, "trajectories")
        self._made: Future[None] | None = None
        self._disk = RecordThread("trajectory files")

    def wants(self, step: int) -> bool:
        return self._freq > 0 and step % self._freq == 0

    def write(self, step: int, rows: Callable[[], Sequence[Row]]) -> None:
        """Starts to write the rows of a step, which a thread makes. Waits until the previous step's are made."""
        self._wait_until_made()
        self._made = self._making.submit(self._make, step, rows)

    def truncate(self, last_step: int) -> None:
        """Removes the files of later steps: a resumed run takes these steps again."""
        for file in self._directory.glob("step_*.parquet"):
            if file.name > _file(self._directory, last_step).name:
                file.unlink()

    def flush(self) -> None:
        """Waits until everything is written."""
        self._wait_until_made()
        self._disk.flush()

    def close(self) -> None:
        """`flush`, and ends the threads."""
        self._wait_until_made()
        self._making.shutdown()
        self._disk.close()

    def _make(self, step: int, rows: Callable[[], Sequence[Row]]) -> None:
        table = pa.Table.from_pylist([{"step": step, **row} for row in rows()], schema=SCHEMA)
        content = pa.BufferOutputStream()
        pq.write_table(table, content, compression="zstd")
        written = content.getvalue()
        self._disk.put(partial(self._save, step, written), written.size)

    def _save(self, step: int, content: pa.Buffer) -> None:
        try:
            with atomic_file(_file(self._directory, step)) as temporary:
                temporary.write_bytes(content)
        except OSError as error:
            logger.warning("%s: trajectories cannot be written: %s", self._directory, error)

    def _wait_until_made(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.result()


def text_of(ground_truth: object) -> str:
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, ensure_ascii=False, default=str)


def recorded_steps(directory: Path) -> list[int]:
    """The steps with a file, in order."""
    named = (_NAME.fullmatch(file.name) for file in directory.glob("step_*.parquet"))
    return sorted(int(name[1]) for name in named if name)


def read_trajectories(directory: Path, step: int | None = None) -> list[TrajectoryRow]:
    """The trajectories of a step, the last one if it is None. Raises DataError."""
    steps = recorded_steps(directory)
    if not steps:
        raise DataError(f"{directory}: no trajectories", hint="set trainer.trajectories.freq to 1 or more in the run")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise DataError(f"{directory}: no trajectories of step {step}", hint=f"there are {_ranges(steps)}")
    file = _file(directory, step)
    try:
        with os.fdopen(open_regular(file), "rb") as opened:
            table = pq.read_table(opened, columns=SCHEMA.names).cast(SCHEMA)
        table.validate(full=True)
        rows: list[TrajectoryRow] = table.to_pylist()
        if absent := [name for name in _GIVEN if table[name].null_count]:
            raise ValueError(f"it has rows without {', '.join(absent)}")
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{file}: damaged: {error}", hint="delete it and read another step") from error
    return rows


def show(row: TrajectoryRow) -> str:
    """A trajectory as text for a terminal."""
    try:
        numbers = _SCORES.validate_json(row["scores"] or "{}")
    except ValidationError:
        numbers = {}
    parts = "".join(f", {name} {value:g}" for name, value in numbers.items() if value is not None)
    title = f"step {row['step']}, {row['data_source']}, reward {row['reward']:g}{parts}, {row['tokens']} tokens"
    texts = (("prompt", row["prompt"]), ("response", row["response"]), ("ground truth", row["ground_truth"]))
    return printable("\n".join([f"=== {title}", *(f"--- {name}\n{text}" for name, text in texts)]))


def _file(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}.parquet"


def _ranges(steps: Sequence[int]) -> str:
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
