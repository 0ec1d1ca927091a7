"""The command `sbom`."""

import sys
from typing import Annotated

import typer

from buildkit.commands.options import ImageName, Project, TargetName, VariantName, open_matrix
from buildkit.errors import UsageError
from buildkit.publishing import sbom as bills
from buildkit.publishing.inventory import read_local
from buildkit.recipe.lock_file import read_lock
from buildkit.running.engine import Docker

FORMATS = {"cyclonedx": bills.cyclonedx, "spdx": bills.spdx}


def sbom(
    target: TargetName,
    variant: VariantName = None,
    image: ImageName = None,
    kind: Annotated[str, typer.Option("--format", help="cyclonedx or spdx, as JSON.")] = "cyclonedx",
    project: Project = None,
) -> None:
    """Print the bill of materials (SBOM) of a built image: wheels, Debian packages and base."""
    if kind not in FORMATS:
        raise UsageError(f"there is no format `{kind}`", f"one of: {', '.join(FORMATS)}")
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant)
    engine, name = Docker(), image or f"slipway:{chosen.identifier}"
    built = engine.find(name)
    if built is None:
        raise UsageError(f"there is no image {name}", f"run `buildkit build --target {chosen.target}`")
    bill = bills.describe_image(read_local(engine.binary, name), built.labels, read_lock(matrix, chosen))
    sys.stdout.buffer.write(bills.encode(FORMATS[kind](bill)))
