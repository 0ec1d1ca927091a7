"""What others wrote reaches a terminal as text."""

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from trainer.cli import app
from trainer.config.sections.trainer import TrajectoriesConfig
from trainer.config.tree import Config
from trainer.records.files.owner import OWNER
from trainer.records.printable import printable
from trainer.records.top import watch
from trainer.records.tracking import PHASE, Tracker
from trainer.records.trajectories import TrajectoryWriter

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202egpj.exe \r[red]x[/red][/nothing]\x00"


@given(st.text())
def test_no_character_that_a_terminal_acts_on_is_left(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)


@pytest.mark.parametrize("text", ["a\tb\nc", "naïve 数学 ✓ 👩‍🔬", "\\x1b"])
def test_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


def test_samples_shows_control_sequences_of_a_model_as_text(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path / "trajectories", TrajectoriesConfig())
    row = {"data_source": HOSTILE, "prompt": HOSTILE, "response": HOSTILE, "ground_truth": HOSTILE, "reward": 1.0}
    writer.write(1, lambda: [{**row, "scores": json.dumps({HOSTILE: 1.0}), "tokens": 3}])
    writer.close()
    shown = CliRunner().invoke(app, ["samples", str(tmp_path)]).stdout
    assert shown.count(r"\x1b]0;title\x07\x1b[2J\x9b31m\u202egpj.exe \r[red]x[/red][/nothing]\x00") == 5
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)


def test_top_shows_names_from_a_runs_files_as_text(tmp_path: Path) -> None:
    with Tracker(tmp_path, Config()) as tracker:
        tracker.begin()
        tracker.log_waits(1, {"rollout": (1.0, HOSTILE)})
        tracker.log(1, {"time/step": 1.0, f"time/{HOSTILE}": 0.5})
    (tmp_path / OWNER).write_text(json.dumps({"pid": 1, "host": HOSTILE}))
    (tmp_path / PHASE).write_text(json.dumps({"phase": HOSTILE, "since": 0.0, "total_steps": 3}))
    screen = io.StringIO()
    watch(tmp_path, Console(file=screen, width=600))
    assert screen.getvalue().count(r"\x1b[2J") == 4
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", screen.getvalue())
