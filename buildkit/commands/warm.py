"""The command `warm`."""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from buildkit.commands.arguments import command
from buildkit.commands.job import Variables, Volumes
from buildkit.commands.options import (
    AsJson,
    EngineName,
    ImageName,
    Project,
    RegistryCa,
    SigningKey,
    TargetName,
    VariantName,
    emit,
    errors,
    open_matrix,
)
from buildkit.errors import UsageError
from buildkit.registry.client import Registry
from buildkit.registry.credentials import read_credentials
from buildkit.registry.reference import parse_reference
from buildkit.registry.signature import Signer
from buildkit.running.engine import open_engine
from buildkit.warming.artifact import push as push_archive
from buildkit.warming.warm import WarmRun, make_cache


@dataclass(frozen=True, kw_only=True)
class WarmArguments:
    target: TargetName
    command: Annotated[
        list[str],
        typer.Argument(help="Job for `launch`, after `--`. Default: PPO of a small model.", metavar="COMMAND…"),
    ] = field(default_factory=list)
    variant: VariantName = None
    image: ImageName = None
    volume: Volumes = field(default_factory=list)
    env: Variables = field(default_factory=list)
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the cache. Default: named after its key, here.")
    ] = None
    push: Annotated[
        str | None,
        typer.Option(
            help="Push it, too: HOST[:PORT]/REPOSITORY. With the image's :TAG or @DIGEST, it refers to the image.",
            metavar="REF",
        ),
    ] = None
    key: SigningKey = None
    registry_ca: RegistryCa = None
    engine: EngineName = "auto"
    as_json: AsJson = False
    project: Project = None

    def check(self) -> Registry | None:
        """The registry to push to. Raises errors that would otherwise come after the run."""
        if self.output and not self.output.parent.is_dir():
            raise UsageError(
                f"--output {self.output}: there is no folder {self.output.parent}", "create it, or name another file"
            )
        if self.key and not self.push:
            raise UsageError("--key signs what is pushed", "add --push HOST[:PORT]/REPOSITORY, or leave out --key")
        if not self.push:
            return None
        reference = parse_reference(self.push)
        registry = Registry(reference, read_credentials(reference.host), self.registry_ca)
        registry.check_access()
        return registry


@command
def warm(arguments: WarmArguments) -> None:
    """Run a short job of a built image on this machine, and pack what it compiled, for others to start with.

    Compiled code depends on the model's shapes and on some settings: name your own model and settings after `--`.
    It fits images with the same lock, on the same GPUs and driver. On CPU, training compiles nothing.
    """
    chosen = open_matrix(arguments.project).variant(arguments.target, arguments.variant)
    registry = arguments.check()
    run = WarmRun(
        variant=chosen,
        image=arguments.image or f"slipway:{chosen.identifier}",
        command=tuple(arguments.command),
        volumes=tuple(arguments.volume),
        environment=tuple(arguments.env),
    )
    path = arguments.output or Path(f"{chosen.identifier}.warm.tar.zst")
    cache = make_cache(run, open_engine(arguments.engine), path)
    if arguments.output is None:
        path = path.rename(f"{cache.name}.tar.zst")
    signer = Signer(arguments.key) if arguments.key else None
    pushed = str(push_archive(registry, path, signer, arguments.registry_ca)) if registry else None
    errors.print(
        escape(
            f"{cache.files} files, {cache.bytes / 1e6:.1f} MB, packed {path.stat().st_size / 1e6:.1f} MB; "
            f"no name or path of this host, no secret of this job in it"
        )
    )
    if arguments.as_json:
        emit({**asdict(cache), "file": str(path), "pushed": pushed})
    else:
        sys.stdout.write(f"{path}\n" + (f"{pushed}\n" if pushed else ""))
