"""Programs that start engines."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.training.ranks import run_program

# Engines of vLLM: the rank of the adapters, and the processes that the engine spans.
VLLM = [
    pytest.param((0, 1), id="vllm"),
    pytest.param((4, 1), id="vllm with adapters"),
    pytest.param((0, 2), id="vllm over two processes", marks=pytest.mark.full),
]


def results_of(program: Path, directory: Path, *arguments: object) -> dict[str, Any]:
    """What the program writes to results.json in the directory. A process of its own, because importing vLLM changes
    torch."""
    run_program(program, directory, *map(str, arguments))
    results: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return results
