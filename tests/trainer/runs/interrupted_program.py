"""Runs that Python starts in one process: a reward function interrupts the first, and another run continues it."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import trainer
from trainer.config.tree import Config
from trainer.errors import InterruptedRun

settings, output = json.loads(sys.argv[1]), Path(sys.argv[2])
controller, once, metrics = os.getpid(), output / "interrupted", output / "run" / "metrics.jsonl"


def interrupting(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:
    """Interrupts the controller in the second step."""
    if metrics.is_file() and metrics.read_bytes().count(b"\n"):
        with suppress(FileExistsError):
            once.touch(exist_ok=False)
            os.kill(controller, signal.SIGINT)
    return sum(letter.isdigit() for letter in solution_str)


config = Config.model_validate({**settings, "trainer": {**settings["trainer"], "total_steps": 2000}})
handler = signal.getsignal(signal.SIGINT)
with pytest.raises(InterruptedRun, match="stopped by SIGINT after step") as caught:
    trainer.train(config, reward=interrupting)
last = trainer.Run(output / "run").checkpoint
assert caught.value.__notes__ == [f"hint: continue with trainer.resume={last}"]
assert signal.getsignal(signal.SIGINT) is handler
assert psutil.Process().children(recursive=True) == []
assert list(Path(os.environ["RAY_TMPDIR"]).iterdir()) == []
steps = [row["step"] for row in trainer.Run(output / "run").metrics]
continued = {**settings, "trainer": {**settings["trainer"], "total_steps": steps[-1] + 1, "resume": "auto"}}
run = trainer.train(continued, reward=interrupting)
assert [row["step"] for row in run.metrics] == [*steps, steps[-1] + 1]
assert run.checkpoint == output / "run" / "checkpoints" / f"step_{steps[-1] + 1:06}"
assert run.model == output / "run" / "model"
