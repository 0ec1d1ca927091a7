"""What the commands share: their options, where they find the project, and how they print."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from buildkit.errors import UsageError
from buildkit.host.accelerators import ACCELERATORS
from buildkit.recipe.matrix import Matrix, load_matrix
from buildkit.recipe.project import find_project

errors = Console(stderr=True, highlight=False, soft_wrap=True)

Project = Annotated[
    Path | None, typer.Option(help="A Slipway checkout. Default: the one around this folder, else the installed data.")
]
TargetName = Annotated[str, typer.Option("--target", "-t", help=f"{', '.join(ACCELERATORS)}.")]
VariantName = Annotated[
    str | None, typer.Option("--variant", help="A variant of the target; its first when not given.")
]
WithDebug = Annotated[
    bool, typer.Option("--with-debug", help="With debugpy, py-spy, gdb and Ray's post-mortem debugger.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
BaseChoice = Annotated[str, typer.Option("--base", help="auto, registry or bootstrap.")]
EngineName = Annotated[str, typer.Option("--engine", help="auto, docker or podman.")]
ImageName = Annotated[str | None, typer.Option("--image", help="Another image than the target's own.")]
RegistryCa = Annotated[
    Path | None,
    typer.Option(
        "--registry-ca",
        envvar="SLIPWAY_REGISTRY_CA",
        exists=True,
        dir_okay=False,
        help="PEM file with the registry's authority; docker's own for it, or the system's, when not given.",
    ),
]


def open_matrix(project: Path | None) -> Matrix:
    return load_matrix(find_project(project, Path.cwd()))


def emit(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def parse_size(text: str, option: str) -> int:
    """Bytes of a size in docker's notation: 1024 is the step from k to m, g and t."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)i?b?", text.lower())
    if match is None:
        raise UsageError(f"{option} {text}: no size", "write it like 512g or 2t")
    bytes_of_unit: int = 1024 ** " kmgt".index(match[2] or " ")
    return int(match[1]) * bytes_of_unit


def table_console(width: int = 160) -> Console:
    """Tables for a terminal have its width, those for a file `width` columns."""
    return Console(width=None if sys.stdout.isatty() else width)
