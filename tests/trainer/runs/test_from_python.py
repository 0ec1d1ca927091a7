"""Runs that Python starts: the notebook of the examples, an interrupt, and several runs in one process."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.json_lines import read_rows
from tests.trainer.training.ranks import environment
from trainer.data.arithmetic import write_arithmetic

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "examples" / "notebooks" / "grpo.ipynb"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """All temporary files of a run; the path is short enough for Ray."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as directory:
        yield Path(directory)


def python(temporary: Path, cwd: Path, *arguments: object) -> str:
    """The standard output of a program that starts runs, and has left nothing of them."""
    variables = {**environment(), "RAY_TMPDIR": str(temporary)}
    variables.pop("RAY_ADDRESS", None)
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert list(temporary.iterdir()) == []
    return done.stdout


def test_the_notebook_has_no_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_the_notebook_trains_with_its_own_reward_and_continues(tmp_path: Path, temporary: Path) -> None:
    printed = python(temporary, tmp_path, Path(__file__).with_name("notebook_program.py"), NOTEBOOK)
    rows = [row for row in read_rows(tmp_path / "runs" / "digits" / "metrics.jsonl") if "reward/mean" in row]
    assert [row["step"] for row in rows] == [*range(1, 15)]
    assert rows[11]["reward/mean"] > rows[0]["reward/mean"] + 0.2
    assert f"{rows[0]['reward/mean']:.2f} in the first step, {rows[11]['reward/mean']:.2f} in the last" in printed
    assert (tmp_path / "runs" / "digits" / "model" / "adapter" / "adapter_model.safetensors").is_file()


def test_an_interrupted_run_leaves_nothing_and_the_process_continues_it(
    tmp_path: Path, temporary: Path, model: Path
) -> None:
    train, _, held_out = write_arithmetic(tmp_path / "data", 64, 4, 9, 0.75, 0)
    settings = {
        "model": {"path": str(model)},
        "data": {
            "train_files": [str(train)],
            "validation_files": [str(held_out)],
            "max_prompt_length": 128,
            "train_batch_size": 4,
        },
        "rollout": {"samples_per_prompt": 2, "engine": "transformers"},
        "actor": {"mini_batch_size": 8},
        "algorithm": {"advantage": "grpo", "kl_coefficient": 0},
        "trainer": {
            "output_dir": str(tmp_path),
            "run_id": "run",
            "test_freq": -1,
            "test_before_training": False,
        },
    }
    program = ("-m", "tests.trainer.runs.interrupted_program")
    python(temporary, tmp_path, *program, json.dumps(settings), tmp_path)
    assert (tmp_path / "interrupted").exists()
