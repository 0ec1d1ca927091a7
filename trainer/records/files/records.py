"""The records of a run, read back: files with a JSON object per line, each checked by its type.

Whatever is no record, like a line that a full disk tore or a bit flip changed, is left out and named.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12 on

from trainer.errors import DataError
from trainer.records.files.regular import open_regular
from trainer.records.files.sealed import first_complaint

CONFIG, PHASE = "config.json", "phase.json"
METRICS, SAMPLES, WAITS = "metrics.jsonl", "samples.jsonl", "waits.jsonl"
LONGEST_LINE = 2**26  # bytes
_NAMED = 3  # lines in a message

Row = TypeVar("Row")
MetricsRow = dict[str, float]
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""Numbers that are not finite are null in JSON."""
Step = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _with_step(row: MetricsRow) -> MetricsRow:
    step = row.get("step", math.nan)
    if not 0 <= step < 2**53 or step != int(step):
        raise ValueError("it has no step")
    return {**row, "step": int(step)}


class SampleRow(TypedDict):
    step: Step
    prompt: str
    response: str
    ground_truth: str
    reward: Number


class Wait(TypedDict):
    seconds: Seconds
    slowest: str


class WaitsRow(TypedDict):
    step: Step
    waits: dict[str, Wait]


METRICS_ROWS: TypeAdapter[MetricsRow] = TypeAdapter(Annotated[dict[str, Number], AfterValidator(_with_step)])
SAMPLE_ROWS: TypeAdapter[SampleRow] = TypeAdapter(SampleRow)
WAITS_ROWS: TypeAdapter[WaitsRow] = TypeAdapter(WaitsRow)


@dataclass(frozen=True)
class Line(Generic[Row]):
    """A line of a file: its text, and the record in it, or its number and why there is none."""

    text: bytes
    row: Row | None
    complaint: str = ""


def lines(path: Path, kind: TypeAdapter[Row]) -> Iterator[Line[Row]]:
    """The lines of a file, without a last one that was cut off when the run died; none if there is no file.

    Only a line feed ends a line: a model may write U+2028. Raises OSError.
    """
    if not path.exists():
        return
    with os.fdopen(open_regular(path), "rb") as file:
        number, started = 0, False
        while text := file.readline(LONGEST_LINE):
            ended = text.endswith(b"\n")
            if not started:
                number += 1
                if ended:
                    yield _line(number, text, kind)
                elif len(text) == LONGEST_LINE:
                    yield Line(b"", None, f"line {number} (longer than {LONGEST_LINE} bytes)")
            started = not ended


def _line(number: int, text: bytes, kind: TypeAdapter[Row]) -> Line[Row]:
    try:
        return Line(text, kind.validate_json(text, strict=True))
    except ValidationError as error:
        return Line(text, None, f"line {number} ({first_complaint(error)})")


def left_out(path: Path, complaints: Sequence[str]) -> str:
    """A message about the damaged lines of a file."""
    more = f" and {len(complaints) - _NAMED} more" if len(complaints) > _NAMED else ""
    count = "1 line is no record and" if len(complaints) == 1 else f"{len(complaints)} lines are no records and"
    verb = "is" if len(complaints) == 1 else "are"
    return f"{path}: {count} {verb} left out: {', '.join(complaints[:_NAMED])}{more}"


def read_records(path: Path, kind: TypeAdapter[Row], note: Callable[[str], object]) -> list[Row]:
    """The records of a file; none if there is no file. `note` gets a message about damaged lines.

    Raises DataError if the file cannot be read.
    """
    rows, complaints = [], []
    try:
        for line in lines(path, kind):
            if line.row is None:
                complaints.append(line.complaint)
            else:
                rows.append(line.row)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}", hint="restore it, or remove it") from error
    if complaints:
        note(left_out(path, complaints))
    return rows
