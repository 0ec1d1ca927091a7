"""Faults that are injected, and what each of them must leave behind."""

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from tests.json_lines import append_row, read_rows

STEPS_LOST = 1
"""Most steps that a fault may cost a run that saves after every step."""


@dataclass
class Injection:
    """One injected fault and its consequences. `None` where a column says nothing about this kind."""

    kind: str
    seed: int
    nodes: int = 1
    moment: str = ""
    """When it was injected, in words."""
    detected: float | None = None
    """Seconds until a message named the fault."""
    ended: float | None = None
    """Seconds until the last node ended; None if the run went on."""
    exits: list[int] = field(default_factory=list)
    """Exit codes of the nodes that could report one."""
    processes: int | None = None
    """Processes left."""
    files: int | None = None
    """Files left in /tmp, /dev/shm and under hidden names in the run's directory."""
    steps_lost: int | None = None
    readable: bool | None = None
    """Whether a whole checkpoint was there afterwards, if there was one before."""
    cause: str | None = ""
    """The message that named the fault; None if nobody was left to say it."""
    problems: list[str] = field(default_factory=list)
    """Broken promises; empty if the injection passed."""
    date: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"))

    def expect(self, kept: bool, problem: str) -> None:
        """Notes a problem unless a promise was kept."""
        if not kept:
            self.problems.append(problem)

    def expect_clean(self) -> None:
        """What holds after every fault: nothing left, little lost, the checkpoint whole, the cause named."""
        self.expect(not self.processes, f"{self.processes} processes left")
        self.expect(not self.files, f"{self.files} files left")
        self.expect(self.steps_lost is None or self.steps_lost <= STEPS_LOST, f"{self.steps_lost} steps lost")
        self.expect(self.readable is not False, "no checkpoint can be read")
        self.expect(self.cause != "", "no message names the cause")


class NotStartedError(Exception):
    """What the fault was meant for did not start, on a machine that is too busy, so nothing was injected."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `act` injects it and fills in the consequences; it draws moment and place."""

    name: str
    act: Callable[[Random, Injection], None]

    def inject(self, seed: int) -> Injection:
        """Raises NotStartedError."""
        injection = Injection(self.name, seed)
        self.act(Random(f"{self.name} {seed}"), injection)
        return injection


def recorded(file: Path) -> list[Injection]:
    """The injections in a file of JSON lines."""
    return [Injection(**row) for row in read_rows(file)]


def record(file: Path, injection: Injection) -> None:
    append_row(file, asdict(injection))


def markdown(injections: Sequence[Injection]) -> list[str]:
    """Lines of a table with a row per kind."""
    lines = [
        "| fault | injected | seconds to the message | exit codes | processes, files left | most steps lost | "
        "checkpoint readable | cause named | broken promises |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return lines + [
        _row(name, [injection for injection in injections if injection.kind == name]) for name in _kinds(injections)
    ]


def _kinds(injections: Sequence[Injection]) -> list[str]:
    return list(dict.fromkeys(injection.kind for injection in injections))


def _row(name: str, injections: Sequence[Injection]) -> str:
    four = sum(injection.nodes == 4 for injection in injections)
    seconds = [injection.detected for injection in injections if injection.detected is not None]
    lost = [injection.steps_lost for injection in injections if injection.steps_lost is not None]
    readable = [injection.readable for injection in injections if injection.readable is not None]
    codes = sorted({code for injection in injections for code in injection.exits})
    causes = [injection.cause for injection in injections if injection.cause is not None]
    cells = [
        name,
        f"{len(injections)}, {four} of them on four nodes" if four else str(len(injections)),
        _spread(seconds),
        ", ".join(map(str, codes)) or "-",
        f"{_most(each.processes for each in injections)}, {_most(each.files for each in injections)}",
        _most(lost),
        f"{sum(readable)} of {len(readable)}" if readable else "-",
        f"{sum(map(bool, causes))} of {len(causes)}" if causes else "-",
        str(sum(bool(injection.problems) for injection in injections) or "none"),
    ]
    return "| " + " | ".join(cells) + " |"


def _spread(seconds: Sequence[float]) -> str:
    """Median and maximum."""
    if not seconds:
        return "-"
    median, most = (
        f"{value:.1f}" if value >= 0.1 else "under 0.1" for value in (statistics.median(seconds), max(seconds))
    )
    return median if median == most else f"{median}, at most {most}"


def _most(counts: Iterable[int | None]) -> str:
    known = [count for count in counts if count is not None]
    return "-" if not known else str(max(known) or "none")


def first_line(pattern: str, text: str) -> str:
    """The first line that matches; empty if none does."""
    return next((line.strip() for line in text.splitlines() if re.search(pattern, line)), "")
