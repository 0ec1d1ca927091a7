"""The commit that an image is labelled with, and what makes a checkout differ from it. Git is real."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from buildkit.recipe.project import UNCOMMITTED, is_committed, source_revision, uncommitted


def git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clean checkout; git ignores `*.swp` and the folder of compiled code."""
    for name in ("images/a.toml", "trainer/a.py", "docs/a.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("old\n")
    (tmp_path / ".gitignore").write_text("*.swp\n__pycache__/\n/build\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def write(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("new\n")

    return change


def stage(root: Path) -> None:
    write("trainer/a.py")(root)
    git(root, "add", ".")


def test_a_clean_checkout_is_its_commit(checkout: Path) -> None:
    for name in ("trainer/__pycache__/a.pyc", "build/a", "docs/a.swp"):
        write(name)(checkout)
    assert source_revision(checkout) == git(checkout, "rev-parse", "HEAD")
    assert is_committed(checkout, checkout / "images/a.toml")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (write("trainer/a.py"), "trainer/a.py"),
        (write("trainer/new.py"), "trainer/new.py"),
        (write("trainer/a.swp"), "trainer/a.swp"),  # ignored, and copied into the image
        (write("docs/a.md"), "docs/a.md"),
        (stage, "trainer/a.py"),
        (lambda root: (root / "trainer/a.py").unlink(), "trainer/a.py"),
        (lambda root: (root / "trainer/a.py").chmod(0o755), "trainer/a.py"),
        (lambda root: (root / ".git/index").write_bytes(b"damaged"), "what git cannot compare"),
    ],
)
def test_a_changed_checkout_is_not_its_commit(checkout: Path, change: Callable[[Path], None], name: str) -> None:
    git(checkout, "config", "status.showUntrackedFiles", "no")
    change(checkout)
    assert name in uncommitted(checkout)
    assert source_revision(checkout) == git(checkout, "rev-parse", "HEAD") + UNCOMMITTED


def test_a_file_that_git_does_not_know_is_not_committed(checkout: Path) -> None:
    for name in ("images/new.toml", "images/a.swp", "images/absent"):
        assert not is_committed(checkout, checkout / name)


def test_a_folder_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert source_revision(tmp_path) == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_revision(tmp_path) == ""
