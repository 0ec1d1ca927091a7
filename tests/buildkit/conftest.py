"""The repository's matrix, and a small project that tests may damage."""

from pathlib import Path

import pytest

from buildkit.recipe.matrix import Matrix, load_matrix

ROOT = Path(__file__).parents[2]

SMALL_MATRIX = """
schema = 1
[bases.debian12]
image = "debian:bookworm-slim"
glibc = "2.36"
python = "3.11"
bootstrap = { suite = "bookworm", variant = "minbase" }
[packages]
common = ["tini"]
[targets.cpu]
disk_gib = 1
summary = "test"
[targets.cpu.variants.small]
base = "debian12"
status = "untested"
requirements = ["six==1.17.0"]
"""

PYPROJECT = """
[project]
name = "small"
version = "1.2.3"
[project.optional-dependencies]
image = ["idna==3.10"]
"""


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return load_matrix(ROOT)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A minimal project: matrix, templates and environment tables."""
    (tmp_path / "images" / "env").mkdir(parents=True)
    (tmp_path / "images" / "matrix.toml").write_text(SMALL_MATRIX)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "images" / "templates").symlink_to(ROOT / "images" / "templates")
    (tmp_path / "images" / "chips.toml").symlink_to(ROOT / "images" / "chips.toml")
    for name in ("common", "cpu"):
        (tmp_path / "images" / "env" / f"{name}.toml").write_text("")
    return tmp_path
