"""Files of the user whose code a run executes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LOADERS = {
    "a file": "from trainer.config.custom_code import load_custom; load_custom('reward', Path('mine.py'), 'score')",
    "a class": "from trainer.data.formats.tools import load_class; load_class('tools', 'mine.score')",
}


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_code_of_the_user_imports_modules_beside_it_under_launch(tmp_path: Path, load: str) -> None:
    """`launch` starts the trainer with -P, without the current directory among Python's."""
    (tmp_path / "mine.py").write_text("from neighbour import score\n")
    (tmp_path / "neighbour.py").write_text("def score(): ...\n")
    (tmp_path / "json.py").write_text("raise SystemExit('the json.py of the user')\n")
    program = f"from pathlib import Path; {load}; import json"
    command = [sys.executable, "-P", "-c", program]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
