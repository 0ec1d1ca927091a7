"""A run whose rank stalls is ended by `trainer.on_stall=end`, and `launch` starts it again from its last checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.two_nodes import LAUNCH, SMALL
from tests.trainer.runs.recovery import signalled_rank
from tests.trainer.whole_run import ROOT, Run, Runs
from trainer.data.arithmetic import write_arithmetic


@pytest.mark.full
def test_a_stalled_rank_leads_to_a_restart_from_the_last_checkpoint(runs: Runs, tmp_path: Path) -> None:
    _, demonstrations, held_out = write_arithmetic(tmp_path, 64, 15, 9, dropped_carries=0.0, seed=0)
    settings = {
        "model.path": runs.model,
        "data.train_files": demonstrations,
        "data.validation_files": held_out,
        "data.train_batch_size": 16,
        "sft.response_key": "extra_info.answer",
        "sft.max_length": 128,
        "trainer.output_dir": tmp_path,
        "trainer.run_id": "stalled",
        "trainer.total_steps": 12,
        "trainer.save_freq": 1,
        "trainer.resume": "auto",
        "trainer.on_stall": "end",
        "trainer.stall_seconds": 8,
    }
    program = [sys.executable, signalled_rank.__file__, "SIGSTOP", "0", "saved", str(tmp_path / "stopped"), "sft"]
    process = subprocess.Popen(
        [
            *LAUNCH,
            *SMALL,
            "--max-restarts",
            "3",
            "--",
            *program,
            *(f"{key}={value}" for key, value in settings.items()),
        ],
        cwd=ROOT,
        env={**os.environ, "SLIPWAY_SINGLE": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    run = Run(process, tmp_path / "stalled")
    log = run.succeed()
    updates = int((tmp_path / "stopped").read_text())
    assert "actor rank 0 on " in log
    assert "is stopped by a signal (SIGSTOP)" in log
    assert "the command failed with status 5; restart 1 of 3" in log
    # The stalled rank may not have written the last one to its end.
    resumed = re.search(rf"trainer.resume=auto: {run.directory}/checkpoints/step_(\d+)\n", log)
    assert resumed
    assert 1 <= int(resumed[1]) <= updates
    assert [row["step"] for row in run.metrics()] == list(range(13))
