"""The command `export`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from buildkit.commands.options import AsJson, EngineName, ImageName, Project, TargetName, VariantName, emit, open_matrix
from buildkit.errors import UsageError
from buildkit.images.export import FORMATS, SUFFIXES, export_image
from buildkit.running.engine import open_engine
from buildkit.running.formats import image_file


def export(
    target: TargetName,
    form: Annotated[str, typer.Option("--format", help=f"{', '.join(FORMATS)}.")] = "oci",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Output file. Default: named after the image.")
    ] = None,
    variant: VariantName = None,
    image: ImageName = None,
    engine: EngineName = "auto",
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Write a built image to a file: an archive for other engines, or an image for enroot or apptainer."""
    if form not in FORMATS:
        raise UsageError(f"--format {form}: unknown format", f"one of: {', '.join(FORMATS)}")
    chosen = open_matrix(project).variant(target, variant)
    name = image or f"slipway:{chosen.identifier}"
    path = (output or Path(image_file(name, SUFFIXES[form]))).absolute()
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: the folder {path.parent} does not exist", "create it first")
    size = export_image(open_engine(engine), name, form, path)
    if as_json:
        emit({"image": name, "format": form, "file": str(path), "bytes": size})
    else:
        sys.stdout.write(f"{path}\n")
