"""Options and output that several commands share."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from buildkit.errors import BuildkitError, UsageError
from buildkit.host.accelerators import ACCELERATORS
from buildkit.recipe.matrix import Matrix, load_matrix
from buildkit.recipe.platform import PLATFORMS
from buildkit.recipe.project import find_project
from buildkit.recipe.user_file import find_user_file
from buildkit.warming.source import Source

errors = Console(stderr=True, highlight=False, soft_wrap=True)

Project = Annotated[
    Path | None, typer.Option(help="A Slipway checkout. Default: the one around this folder, else the installed data.")
]


def complete_variant(context: typer.Context, incomplete: str) -> list[str]:
    """The variants of the target that is on the command line so far, for the shell's completion."""
    try:
        targets = open_matrix(context.params.get("project")).targets
    except BuildkitError:
        return []
    chosen = [targets[name] for name in (context.params.get("target"),) if name in targets] or targets.values()
    return [name for target in chosen for name in target.variants if name.startswith(incomplete)]


def complete_from(*words: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


TargetName = Annotated[
    str,
    typer.Option("--target", "-t", help=f"{', '.join(ACCELERATORS)}.", autocompletion=complete_from(*ACCELERATORS)),
]
VariantName = Annotated[
    str | None,
    typer.Option("--variant", help="Variant of the target. Default: its first.", autocompletion=complete_variant),
]
WithDebug = Annotated[
    bool, typer.Option("--with-debug", help="Add debugpy, py-spy, gdb and Ray's post-mortem debugger.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]
BaseChoice = Annotated[
    str, typer.Option("--base", help="Where the base image comes from: auto, registry or bootstrap.")
]
EngineName = Annotated[str, typer.Option("--engine", help="Container engine: auto, docker or podman.")]
ImageName = Annotated[str | None, typer.Option("--image", help="Image to use. Default: the variant's own tag.")]
PlatformName = Annotated[
    str | None, typer.Option("--platform", help=f"{', '.join(PLATFORMS)}. Default: this host's.", show_default=False)
]
RegistryCa = Annotated[
    Path | None,
    typer.Option(
        "--registry-ca",
        envvar="SLIPWAY_REGISTRY_CA",
        exists=True,
        dir_okay=False,
        help="PEM file of the registry's CA. Default: docker's for that registry, else the system's.",
    ),
]

SigningKey = Annotated[
    str | None,
    typer.Option("--key", envvar="SLIPWAY_SIGN_KEY", help="cosign's key to sign with: a file, or env://, awskms:// …"),
]
SmokeTestArguments = Annotated[list[str], typer.Argument(help="Passed on to pytest for the smoke tests, after `--`.")]


@dataclass(frozen=True, kw_only=True)
class WarmCacheArguments:
    warm: Annotated[
        str | None,
        typer.Option(
            "--warm",
            help="Warm cache to start with, from `buildkit warm`: a file, or HOST[:PORT]/REPOSITORY with @DIGEST or, "
            "if it is signed, :TAG. Without either, the one for the lock, GPUs and driver here.",
            metavar="FILE_OR_REF",
        ),
    ] = None
    warm_key: Annotated[
        str | None,
        typer.Option(
            "--warm-key",
            envvar="SLIPWAY_WARM_KEY",
            help="Public key by which the warm cache is signed in its registry.",
        ),
    ] = None
    registry_ca: RegistryCa = None

    @property
    def source(self) -> Source | None:
        return Source(self.warm, self.warm_key or "", self.registry_ca) if self.warm else None


def open_matrix(project: Path | None) -> Matrix:
    """The project's matrix, with the user's slipway.toml in or above this folder."""
    return load_matrix(find_project(project, Path.cwd()), find_user_file(Path.cwd()))


def emit(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def parse_size(text: str, option: str) -> int:
    """Bytes of a size in docker's notation: 1024 is the step from k to m, g and t."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)i?b?", text.lower())
    if match is None:
        raise UsageError(f"{option} {text}: not a size", "write it like 512g or 2t")
    bytes_of_unit: int = 1024 ** " kmgt".index(match[2] or " ")
    return int(match[1]) * bytes_of_unit


def table_console(width: int = 160) -> Console:
    """A console as wide as the terminal, or `width` columns wide when stdout is a file."""
    return Console(width=None if sys.stdout.isatty() else width)
