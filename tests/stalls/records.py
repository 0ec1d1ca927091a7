"""The results: a line of JSON per injection, which of them are missing, and their table."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.json_lines import append_row, read_rows
from tests.stalls.faults import FAULTS, Fault


@dataclass(frozen=True)
class Record:
    """One injection, `where`: on `2 ranks` of a machine or on `4 nodes`. `lines` are what the run said."""

    where: str
    fault: str
    seed: int
    rank: int
    phase: str
    round: int
    right: bool
    seconds: float
    """From the beginning of the phase, or of a node's fault, to the explanation."""
    lines: list[str]
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"))


def recorded(file: Path) -> list[Record]:
    return [Record(**row) for row in read_rows(file)]


def record(file: Path, result: Record) -> None:
    append_row(file, asdict(result))


def in_turn(faults: Sequence[Fault], where: str, file: Path, seeds: Sequence[int]) -> list[tuple[Fault, int]]:
    """The missing seeds of each fault: the first of every fault, then the second, and so on."""
    done = {(entry.where, entry.fault, entry.seed) for entry in recorded(file)}
    return [(fault, seed) for seed in seeds for fault in faults if (where, fault.name, seed) not in done]


def markdown(records: Sequence[Record]) -> list[str]:
    """Lines of a table with a row per fault and a column per number of ranks or nodes."""
    places = sorted({entry.where for entry in records}, key=lambda where: (where.split()[1] != "ranks", where))
    lines = [
        "| fault | " + " | ".join(places) + " | seconds to the explanation |",
        "| --- |" + " --- |" * (len(places) + 1),
    ]
    for fault in FAULTS:
        if of_fault := [entry for entry in records if entry.fault == fault.name]:
            cells = [_right([entry for entry in of_fault if entry.where == where]) for where in places]
            lines.append(f"| {fault.name} | {' | '.join(cells)} | {_spread([entry.seconds for entry in of_fault])} |")
    cells = [_right([entry for entry in records if entry.where == where]) for where in places]
    return [
        *lines,
        f"| all, right of injected | {' | '.join(cells)} | {_spread([entry.seconds for entry in records])} |",
    ]


def _right(records: Sequence[Record]) -> str:
    return f"{sum(entry.right for entry in records)} of {len(records)}" if records else "-"


def _spread(seconds: Sequence[float]) -> str:
    """Median and maximum."""
    return f"{statistics.median(seconds):.1f}, at most {max(seconds):.1f}" if seconds else "-"
