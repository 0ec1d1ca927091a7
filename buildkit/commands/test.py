"""The command `test`."""

from typing import Annotated

import typer

from buildkit.commands.options import ImageName, Project, TargetName, VariantName, WithDebug, open_matrix
from buildkit.errors import UsageError
from buildkit.images.test import choose_tiers, require_pytest, run_container_tests
from buildkit.running.engine import open_engine


def run_tests(
    target: TargetName,
    variant: VariantName = None,
    with_debug: WithDebug = False,
    image: ImageName = None,
    tier: Annotated[str, typer.Option(help="Which tests: smoke (one container), cluster (two nodes) or all.")] = "all",
    pytest_arguments: Annotated[list[str] | None, typer.Argument(help="Passed on to pytest, after `--`.")] = None,
    project: Project = None,
) -> None:
    """Run the container tests against a built image. Exits with pytest's status."""
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant, with_debug)
    tiers = choose_tiers(tier)
    require_pytest()
    engine, name = open_engine("docker"), image or f"slipway:{chosen.identifier}"
    if engine.find(name) is None:
        raise UsageError(
            f"there is no image {name}", f"run `buildkit build --target {chosen.target} --variant {chosen.name}`"
        )
    raise typer.Exit(run_container_tests(matrix.root, chosen.target, name, tiers, tuple(pytest_arguments or ())))
