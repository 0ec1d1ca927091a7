"""A lock that no longer matches the matrix or the templates is refused; the error names the command that fixes it."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from buildkit.errors import LockError
from buildkit.recipe.lock import Lock, format_lock
from buildkit.recipe.lock_file import inputs_digest, lock_path, read_lock, template_digest
from buildkit.recipe.matrix import load_matrix
from buildkit.recipe.project import is_committed

ROOT = Path(__file__).parents[3]


@pytest.fixture
def locked(project: Path) -> Path:
    """The small project with templates of its own and a current lock."""
    templates = project / "images" / "templates"
    source = templates.resolve()
    templates.unlink()
    shutil.copytree(source, templates)
    matrix = load_matrix(project)
    variant = matrix.variant("cpu")
    lock = Lock(inputs=inputs_digest(matrix, variant), template=template_digest(matrix, variant))
    path = lock_path(matrix, variant)
    path.parent.mkdir(parents=True)
    path.write_text(format_lock(lock, variant.identifier))
    return project


def read(project: Path) -> Lock:
    matrix = load_matrix(project)
    return read_lock(matrix, matrix.variant("cpu"))


def append(name: str, text: str) -> Callable[[Path], None]:
    def edit(project: Path) -> None:
        path = project / "images" / name
        path.write_text(path.read_text() + text)

    return edit


def test_a_current_lock_is_read(locked: Path) -> None:
    assert read(locked).inputs


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (append("templates/Dockerfile.j2", "\nRUN true\n"), "other templates"),
        (append("templates/base_bootstrap.j2", "\nRUN true\n"), "other templates"),
        (append("templates/install-wheels", "true\n"), "other templates"),
        (append("env/cpu.toml", '[[env]]\nname = "A"\nvalue = "1"\nreason = "x"\nsource = "https://x"\n'), "templates"),
        (append("matrix.toml", 'packages = ["gdb"]\n'), "does not match"),
    ],
)
def test_a_lock_is_refused_after_a_change_of_the_images_inputs(
    locked: Path, edit: Callable[[Path], None], words: str
) -> None:
    edit(locked)
    with pytest.raises(LockError, match=words) as caught:
        read(locked)
    assert caught.value.hint == "run `buildkit lock --target cpu --variant small`"


def test_a_comment_in_a_template_keeps_the_lock_valid(locked: Path) -> None:
    append("templates/Dockerfile.j2", "\n# a comment\n")(locked)
    assert read(locked).inputs


def test_a_lock_of_the_commit_is_told_from_one_that_only_this_host_has(locked: Path) -> None:
    path = lock_path(load_matrix(locked), load_matrix(locked).variant("cpu"))
    assert is_committed(locked, path), "there is no git checkout to compare with"

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=locked, check=True)

    git("init", "--quiet")
    git("add", "pyproject.toml")
    git("commit", "-qm", "first")
    assert not is_committed(locked, path)
    git("add", "images/locks")
    assert not is_committed(locked, path)
    git("commit", "-qm", "second")
    assert is_committed(locked, path)
    path.write_text(path.read_text() + "# more\n")
    assert not is_committed(locked, path)


@pytest.mark.parametrize("content", [b"\xff", None])
def test_a_lock_that_cannot_be_read_is_refused(locked: Path, content: bytes | None) -> None:
    matrix = load_matrix(locked)
    path = lock_path(matrix, matrix.variant("cpu"))
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(LockError, match="cannot be read"):
        read(locked)


def test_a_missing_lock_is_named(project: Path) -> None:
    with pytest.raises(LockError, match=r"images/locks/cpu/small\.txt: no lock for cpu-small"):
        read(project)


def test_a_missing_lock_names_the_variants_that_have_one_and_whether_they_train(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "images", tmp_path / "images")
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    matrix = load_matrix(tmp_path)
    first, *others = matrix.targets["rocm"].variants.values()
    for variant in matrix.targets["rocm"].variants.values():
        lock_path(matrix, variant).unlink(missing_ok=True)
    with pytest.raises(LockError) as none:
        read_lock(matrix, first)
    assert "a lock is here" not in none.value.hint
    for variant in others:
        lock_path(matrix, variant).touch()
    with pytest.raises(LockError) as told:
        read_lock(matrix, first)
    for variant in others:
        assert f"--variant {variant.name}" in told.value.hint
    assert "--variant rocm-debian, which cannot train" in told.value.hint
