"""`trainer top`: a run at a glance, from its files."""

import io
import json
import math
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from trainer.config.tree import Config
from trainer.errors import DataError
from trainer.records.files.owner import OWNER, RunOwner
from trainer.records.top import curve, watch
from trainer.records.tracking import PHASE, Tracker


def shown(run_dir: Path) -> str:
    file = io.StringIO()
    watch(run_dir, Console(file=file, width=100))
    return file.getvalue()


def record(run_dir: Path, steps: int) -> None:
    """Steps of 10 s: 7 of generation, 2 of updates."""
    with Tracker(run_dir, Config()) as tracker:
        tracker.begin()
        tracker.expect(40)
        for step in range(1, steps + 1):
            with tracker.phase("update_actor"):
                pass
            times = {"time/generate": 7.0, "time/update_actor": 2.0, "time/step": 10.0}
            tracker.log(step, {"reward/mean": step / steps, "reference/kl": math.nan, **times})


def test_a_running_run_shows_its_phase_the_time_left_and_its_metrics(tmp_path: Path) -> None:
    with RunOwner(tmp_path):
        record(tmp_path, 10)
        text = shown(tmp_path)
    assert "step 10 of 40, about 0:05:00 left" in text
    assert "update actor for 0 s" in text
    assert f"process {os.getpid()} on " in text
    generate, update, other = (
        next(line for line in text.splitlines() if line.startswith(name))
        for name in ("generate", "update actor █", "other")
    )
    assert generate.endswith("7.0 s 70%")
    assert update.endswith("2.0 s 20%")
    assert other.endswith("1.0 s 10%")
    reward = next(line for line in text.splitlines() if line.startswith("reward"))
    assert reward.split() == ["reward", "1.000", "0.550", "▁▂▃▃▄▅▆▆▇█"]
    assert "KL" not in text


def test_workers_that_others_waited_for_are_named_worst_first(tmp_path: Path) -> None:
    with RunOwner(tmp_path):
        record(tmp_path, 2)
        with Tracker(tmp_path, Config(), resumed_step=2) as tracker:
            tracker.begin()
            for step, slowest in ((3, "rollout rank 1 on b"), (4, "rollout rank 1 on b"), (5, "rollout rank 0 on a")):
                waits = {"rollout": (1.5, slowest), "actor": (0.001, "actor rank 0 on a")}
                tracker.log_waits(step, waits)
                tracker.log(step, {"time/step": 10.0, "gpu/utilization": 0.5, "engines/busy": 0.25})
        text = shown(tmp_path)
    lines = [line.split() for line in text.splitlines() if " rank " in line]
    assert lines == [
        ["rollout", "rank", "1", "on", "b", "1.00", "2"],
        ["rollout", "rank", "0", "on", "a", "0.50", "1"],
    ]
    assert "slowest in the last 3 steps" in text
    assert next(line for line in text.splitlines() if line.startswith("GPUs busy")).split()[2] == "50%"


def test_a_run_that_ended_or_died_says_so(tmp_path: Path) -> None:
    with RunOwner(tmp_path):
        record(tmp_path, 2)
    assert "ended" in shown(tmp_path)
    (tmp_path / OWNER).write_text(json.dumps({"pid": 7, "host": "node0"}))
    os.utime(tmp_path / OWNER, (time.time() - 90, time.time() - 90))
    assert "no sign of life for 0:01:30" in shown(tmp_path)
    assert "last process 7 on node0" in shown(tmp_path)


def test_links_in_place_of_the_heartbeat_are_not_followed(tmp_path: Path) -> None:
    for number, target in enumerate((OWNER, "nowhere", "/dev/zero")):
        run_dir = tmp_path / str(number)
        with Tracker(run_dir, Config()) as tracker:
            tracker.begin()
            tracker.log(1, {"reward/mean": 1.0})
        (run_dir / OWNER).symlink_to(target)
        watch(run_dir, Console(file=io.StringIO()))


def test_a_run_without_steps_and_half_a_file_are_no_errors(tmp_path: Path) -> None:
    with RunOwner(tmp_path), Tracker(tmp_path, Config()) as tracker, tracker.phase("start_up"):
        tracker.begin()
        (tmp_path / PHASE).write_text('{"phase": "sta')
        assert "no step is finished yet" in shown(tmp_path)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run there"):
        shown(tmp_path)


def test_a_curve_spans_its_values() -> None:
    assert curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert curve([3.0, 3.0]) == "▁▁"
