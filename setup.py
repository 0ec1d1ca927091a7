"""Puts into the wheel, as `buildkit/project/`, what goes into images, what runs in them, and the container tests."""

import json
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
DATA = ("images", "entrypoints", "trainer", "tests/smoke", "tests/cluster", "pyproject.toml")


class BuildWithData(build_py):
    """An editable installation reads the checkout itself and gets no copy."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copy_data(Path(self.build_lib, "buildkit", "project"))


def copy_data(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name in DATA:
        source, target = ROOT / name, folder / name
        if not source.exists():
            raise SystemExit(f"error: {source} is missing, and a wheel without it cannot build images")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    changed = "-dirty" if git("status", "--porcelain") else ""
    source = {"revision": git("rev-parse", "HEAD") + changed, "date": git("log", "-1", "--format=%ct")}
    (folder / "source.json").write_text(json.dumps(source) + "\n")


def git(*arguments: str) -> str:
    """Empty outside a git checkout of Slipway, also below another project's checkout."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


setup(cmdclass={"build_py": BuildWithData})
