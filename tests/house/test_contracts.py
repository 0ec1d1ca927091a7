"""The contracts between rooms in `pyproject.toml`, each broken once in a copy of the project."""

import pytest

from buildkit.running.flags import LAUNCH_COMMANDS
from entrypoints.cli import COMMANDS
from tests.house.conftest import Project

LINT = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"


def test_the_project_keeps_its_contracts(project: Project) -> None:
    project.output("-c", LINT)


@pytest.mark.parametrize(
    ("path", "imported"),
    [
        ("trainer/algorithms/losses/kl.py", "trainer.config.tree"),
        ("trainer/data/formats/schema.py", "trainer.runs.loop"),
        ("buildkit/recipe/matrix.py", "buildkit.commands.build"),
        ("entrypoints/host/network/hca.py", "entrypoints.job.node"),
        ("entrypoints/errors.py", "buildkit.errors"),
    ],
)
def test_an_arrow_back_up_is_refused_with_its_place(project: Project, path: str, imported: str) -> None:
    project.append(path, f"\nimport {imported}\n")
    done = project.run("-c", LINT)
    assert done.returncode != 0
    assert f"{path.removesuffix('.py').replace('/', '.')} -> {imported}" in done.stdout


def test_buildkit_knows_which_first_words_belong_to_launch() -> None:
    assert set(LAUNCH_COMMANDS) == set(COMMANDS)
