"""The output of a run, with and without a terminal."""

import io

import pytest
from rich.console import Console

from trainer.records.console import RUN_COLUMNS, progress

METRICS = {
    "reward/mean": 0.875,
    "validation/exact_match": 0.9375,
    "reference/kl": 0.0123,
    "actor/entropy": 0.456,
    "actor/clip_fraction": 0.012,
    "time/step": 4.2,
    "throughput/tokens_per_second": 12345.0,
}


def shown(width: int, terminal: bool, steps: int = 12) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, no_color=True, _environ={"TERM": "xterm"})
    with progress(40, 0, RUN_COLUMNS, console) as display:
        display.phase("update_actor")
        for step in range(1, steps + 1):
            display.step(step, METRICS)
    return file.getvalue()


def test_without_a_terminal_each_step_is_one_plain_line() -> None:
    lines = shown(80, terminal=False).splitlines()
    assert len(lines) == 12
    assert lines[0].startswith("step  1/40  reward 0.875  exact match 93.8%")
    assert "\x1b" not in "".join(lines)


def test_a_step_without_metrics_prints_nothing() -> None:
    file = io.StringIO()
    with progress(40, 0, RUN_COLUMNS, Console(file=file)) as display:
        display.step(1, {})
    assert file.getvalue() == ""


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_table_shows_the_last_ten_steps_and_fits(width: int) -> None:
    last_frame = shown(width, terminal=True).rpartition("step")[2]
    rows = [line for line in last_frame.splitlines() if "93.8%" in line]
    assert [int(row.split()[0]) for row in rows] == list(range(3, 13))
    assert all("12,345" in row and "…" not in row and len(row) <= width for row in rows)
    assert "update actor" in last_frame
    assert "12/40" in last_frame
