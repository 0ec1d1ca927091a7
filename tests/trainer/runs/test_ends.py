"""Runs on one machine, with the Ray cluster that they start themselves: how they end, and what they leave."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer.data.arithmetic import write_arithmetic
from trainer.runs.checkpoints.checkpoint import last_checkpoint, read_checkpoint

ROOT = Path(__file__).parents[3]
PATIENCE = 240.0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[str]:
    directory = tmp_path_factory.mktemp("inputs")
    train, _, held_out = write_arithmetic(directory / "data", 64, 4, 9, 0.75, 0)
    return [
        *(f"model.path={model}", f"data.train_files={train}", f"data.validation_files={held_out}"),
        *("data.max_prompt_length=128", "data.max_response_length=16", "data.train_batch_size=4"),
        *("rollout.samples_per_prompt=2", "rollout.engine=transformers", "actor.mini_batch_size=8"),
        *("algorithm.advantage=grpo", "algorithm.kl_coefficient=0", "trainer.test_freq=-1"),
        *("trainer.test_before_training=false", "trainer.total_steps=2000", "trainer.run_id=run"),
    ]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """All temporary files of a run; the path is short enough for Ray."""
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as directory:
        yield Path(directory)


@contextmanager
def started(
    settings: list[str], output: Path, temporary: Path, redirection: str
) -> Iterator["subprocess.Popen[bytes]"]:
    shell = f'exec "$@" {redirection}'
    command = [sys.executable, "-m", "trainer", "train", *settings, f"trainer.output_dir={output}"]
    environment = {**os.environ, "RAY_TMPDIR": str(temporary)} | {"TORCHINDUCTOR_CACHE_DIR": str(output / "compiled")}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(["sh", "-c", shell, "sh", *command], cwd=ROOT, env=environment, start_new_session=True)
    with process:
        try:
            deadline = time.monotonic() + PATIENCE
            while steps(output / "run") < 2:
                assert process.poll() is None, (output / "log").read_text() if (output / "log").exists() else ""
                assert time.monotonic() < deadline, "no step"
                time.sleep(0.1)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def steps(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_run_whose_terminal_is_closed_saves_its_last_step_and_leaves_nothing(
    inputs: list[str], tmp_path: Path, temporary: Path
) -> None:
    """Its console is full from the start, and every process of its group gets the signal."""
    with started(inputs, tmp_path, temporary, "</dev/null >&- 2>/dev/full") as process:
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(PATIENCE) == 129
    last = last_checkpoint(tmp_path / "run")
    assert last is not None
    assert read_checkpoint(last).step == steps(tmp_path / "run")
    assert list(temporary.iterdir()) == []


def test_a_run_whose_directory_is_removed_ends_with_its_last_step_saved(
    inputs: list[str], tmp_path: Path, temporary: Path
) -> None:
    with started([*inputs, "trainer.save_freq=1"], tmp_path, temporary, f">{tmp_path}/log 2>&1") as process:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        assert process.wait(PATIENCE) == 4
    message = (tmp_path / "log").read_text()
    assert f"error: {tmp_path}/run: removed, moved or emptied while the run wrote there" in message
    assert "Traceback" not in message
    last = last_checkpoint(tmp_path / "run")
    assert last is not None
    assert f"continue with trainer.resume={last}" in message
    assert list(temporary.iterdir()) == []
