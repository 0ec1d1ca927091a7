"""The table of docs/tasks/gpus.md says what `trainer plan` says."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SPEC = importlib.util.spec_from_file_location("gpus", ROOT / "docs/tasks/gpus.py")
assert SPEC
assert SPEC.loader
gpus = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpus)
PAGE = (ROOT / "docs/tasks/gpus.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-8B"])
def test_a_row_is_what_the_plan_finds(name: str, tmp_path: Path) -> None:
    assert gpus.row(name, tmp_path) in PAGE, "run: python docs/tasks/gpus.py"


def test_every_model_has_a_row() -> None:
    assert [name for name in gpus.MODELS if f"| {name} |" not in PAGE] == []
