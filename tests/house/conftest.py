"""A copy of the project that a test may add to."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("buildkit", "entrypoints", "images", "tests/entrypoints", "tests/serving.py", "trainer", "pyproject.toml")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


@dataclass(frozen=True)
class Project:
    folder: Path

    def write(self, path: str, text: str) -> None:
        """Adds a file."""
        assert not (self.folder / path).exists()
        (self.folder / path).write_text(text, encoding="utf-8")

    def append(self, path: str, text: str) -> None:
        with (self.folder / path).open("a", encoding="utf-8") as file:
            file.write(text)

    def insert(self, path: str, before: str, text: str) -> None:
        """Writes text before the last occurrence of another."""
        old = (self.folder / path).read_text(encoding="utf-8")
        head, anchor, tail = old.rpartition(before)
        assert anchor
        (self.folder / path).write_text(f"{head}{text}{anchor}{tail}", encoding="utf-8")

    def touched(self) -> set[str]:
        """The files that were added or changed."""
        files = [path for name in COPIED for path in [self.folder / name, *(self.folder / name).rglob("*")]]
        sources = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
        names = [path.relative_to(self.folder) for path in sources]
        return {str(name) for name in names if _differs(self.folder / name, ROOT / name)}

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs Python in the copy, with its code."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            **variables,
        }
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )

    def output(self, *arguments: str, **variables: str) -> str:
        """The standard output of a run that succeeds."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def settings(self, *arguments: str) -> str:
        """The resolved settings of a training run, as JSON."""
        return self.output("-m", "trainer", "config", "--check", *arguments)

    def buildkit(self, *arguments: str) -> str:
        return self.output("-c", "from buildkit.cli import main; main()", *arguments)


def _differs(path: Path, original: Path) -> bool:
    return not original.is_file() or path.read_bytes() != original.read_bytes()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folder = tmp_path / "project"
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=LEFT_OUT)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return Project(folder)
