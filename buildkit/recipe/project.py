"""Finds the project: the checkout that somebody works in, or the copy of its data inside the installed package.

setup.py makes the copy: `images/`, the code of images, the container tests, `pyproject.toml`, and the wheel's commit.
"""

import json
import os
import subprocess
import tomllib
from pathlib import Path

from buildkit.errors import MatrixError

PACKAGES = Path(__file__).parents[2]  # the folder in which buildkit lies: a checkout, or site-packages
INSTALLED = PACKAGES / "buildkit" / "project"
MATRIX = Path("images", "matrix.toml")
IN_IMAGES = ("images", "entrypoints", "trainer")
UNCOMMITTED = "-dirty"  # after a commit: the files are not exactly those of the commit


def find_project(explicit: Path | None, current: Path) -> Path:
    """The project's folder: in or above `explicit`, else in or above `current`, else the one that buildkit came with.

    Raises `MatrixError`.
    """
    start = explicit or current
    for folder in (start, *start.parents):
        if (folder / MATRIX).is_file():
            return folder
    if explicit:
        raise MatrixError(f"no {MATRIX} in or above {explicit}", "name a Slipway checkout, or leave out --project")
    return own_project()


def own_project() -> Path:
    """The project that buildkit came with: its checkout, or the data in its wheel. Raises `MatrixError`."""
    for folder in (PACKAGES, INSTALLED):
        if (folder / MATRIX).is_file():
            return folder
    raise MatrixError(
        f"the installed package lacks its data: there is no {INSTALLED / MATRIX}",
        "install slipway-rl again from a wheel that holds it, or name a Slipway checkout with --project",
    )


def project_version(root: Path) -> str:
    path = root / "pyproject.toml"
    try:
        return str(tomllib.loads(path.read_text(encoding="utf-8"))["project"]["version"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise MatrixError(f"{path} names no version of the project: {error}", "correct it") from error


def source_revision(root: Path) -> str:
    """The commit that the project is at, with `UNCOMMITTED` after it if the files differ; empty without git."""
    if root == INSTALLED:
        return recorded_source()["revision"]
    commit = git(root, "rev-parse", "--verify", "HEAD")
    return f"{commit}{UNCOMMITTED}" if commit and uncommitted(root) else commit


def uncommitted(root: Path) -> list[str]:
    """Files of the checkout that its commit does not have so.

    Of those that git ignores, only what would get into an image counts.
    """
    status = git(root, "status", "--porcelain", "--branch", "--untracked-files=normal", "--", ".").splitlines()
    if not status:  # not even the branch
        return ["what git cannot compare"]
    ignored = git(root, "ls-files", "--others", "--ignored", "--exclude-standard", "--", *IN_IMAGES).splitlines()
    return [line[3:] for line in status[1:]] + [path for path in ignored if "__pycache__/" not in path]


def is_committed(root: Path, path: Path) -> bool:
    """Whether a file of the checkout is as its commit has it; True where there is no git checkout."""
    if root == INSTALLED or not source_revision(root):
        return True
    known = git(root, "ls-files", "--", str(path))
    return bool(known) and not git(root, "status", "--porcelain", "--", str(path))


def source_date(root: Path) -> int:
    """Seconds since the epoch: `SOURCE_DATE_EPOCH` when set, else the date of the commit, else 0."""
    recorded = recorded_source()["date"] if root == INSTALLED else git(root, "log", "-1", "--format=%ct")
    return int(os.environ.get("SOURCE_DATE_EPOCH") or recorded or 0)


def recorded_source() -> dict[str, str]:
    source: dict[str, str] = json.loads((INSTALLED / "source.json").read_text())
    return source


def git(root: Path, *arguments: str) -> str:
    """git's stdout; empty when the project is not a git checkout, or git cannot read it."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.rstrip()
