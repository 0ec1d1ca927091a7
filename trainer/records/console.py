"""Progress of a run on standard error: a live table on a terminal, one line per step elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

_ROWS = 10


@dataclass(frozen=True)
class Column:
    """A metric on the console: its name, its heading and the format of the number."""

    metric: str
    heading: str
    form: str


RUN_COLUMNS = (
    Column("reward/mean", "reward", ".3f"),
    Column("validation/exact_match", "exact match", ".1%"),
    Column("reference/kl", "KL", ".4f"),
    Column("actor/entropy", "entropy", ".3f"),
    Column("actor/clip_fraction", "clip fraction", ".3f"),
    Column("time/step", "seconds", ".1f"),
    Column("throughput/tokens_per_second", "tokens/s", ",.0f"),
)


class Progress(Protocol):
    """A context manager that shows the steps of a run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def expect(self, total_steps: int) -> None:
        """Sets the number of steps, if it was unknown at the start."""

    def phase(self, name: str) -> None:
        """Shows the current phase."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step and its metrics, if there are any."""


def progress(total_steps: int, first_step: int, columns: Sequence[Column], console: Console | None = None) -> Progress:
    """The progress display for standard error: live on a terminal, plain lines elsewhere."""
    console = console or Console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(total_steps, first_step, columns, console)
    return PlainProgress(total_steps, columns, console)


class PlainProgress:
    """One line per step, as `name value` pairs."""

    def __init__(self, total_steps: int, columns: Sequence[Column], console: Console) -> None:
        self._total_steps, self._columns, self._console = total_steps, columns, console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def expect(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def phase(self, name: str) -> None:
        pass

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = [f"{c.heading} {metrics[c.metric]:{c.form}}" for c in self._columns if c.metric in metrics]
        if not shown:
            return
        width = len(str(self._total_steps))
        line = "  ".join([f"step {step:>{width}}/{self._total_steps}", *shown])
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveProgress:
    """The last steps as a table, above a bar with the current phase and the remaining time."""

    def __init__(self, total_steps: int, first_step: int, columns: Sequence[Column], console: Console) -> None:
        self._columns = columns
        self._rows: dict[int, dict[str, float]] = {}
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task: TaskID = self._bar.add_task("starting", total=total_steps, completed=first_step)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def expect(self, total_steps: int) -> None:
        self._bar.update(self._task, total=total_steps)

    def phase(self, name: str) -> None:
        self._bar.update(self._task, description=name.replace("_", " "))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._rows.setdefault(step, {}).update(metrics)
        self._bar.update(self._task, completed=step)

    def _render(self) -> Group | Bar:
        if not self._rows:
            return self._bar
        table = Table(box=None, expand=True, header_style="bold", padding=(0, 1))
        table.add_column("step", justify="right")
        for column in self._columns:
            table.add_column(column.heading, justify="right")
        for step in sorted(self._rows)[-_ROWS:]:
            row = self._rows[step]
            table.add_row(str(step), *(f"{row[c.metric]:{c.form}}" if c.metric in row else "" for c in self._columns))
        return Group(table, self._bar)
