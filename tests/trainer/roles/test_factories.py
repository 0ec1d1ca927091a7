"""Functions that make workers. A worker's process unpickles one before it sets the environment that torch reads."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import trainer.roles.factories
print(sorted({"torch", "vllm", "transformers"} & sys.modules.keys()))
"""


def test_the_factories_import_neither_torch_nor_vllm() -> None:
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "[]", result.stderr
