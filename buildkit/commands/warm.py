"""The command `warm`."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from buildkit.commands.job import Variables, Volumes
from buildkit.commands.options import (
    AsJson,
    EngineName,
    ImageName,
    Project,
    RegistryCa,
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


def warm(
    target: TargetName,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Job for `launch`, after `--`. Default: PPO of a small model.", metavar="COMMAND…"),
    ] = None,
    variant: VariantName = None,
    image: ImageName = None,
    volume: Volumes = None,
    env: Variables = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the cache. Default: named after its key, here.")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            help="Push it, too: HOST[:PORT]/REPOSITORY. With the image's :TAG or @DIGEST, it refers to the image.",
            metavar="REF",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(envvar="SLIPWAY_SIGN_KEY", help="Sign what is pushed with this cosign key: a file, awskms:// …"),
    ] = None,
    registry_ca: RegistryCa = None,
    engine: EngineName = "auto",
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Run a short job of a built image on this machine, and pack what it compiled, for others to start with.

    Compiled code depends on the model's shapes and on some settings: name your own model and settings after `--`.
    It fits images with the same lock, on the same GPUs and driver. On CPU, training compiles nothing.
    """
    chosen = open_matrix(project).variant(target, variant)
    folder = output.parent if output else Path()
    if not folder.is_dir():
        raise UsageError(f"--output {output}: there is no folder {folder}", "create it, or name another file")
    registry = None
    if key and not push:
        raise UsageError("--key signs what is pushed", "add --push HOST[:PORT]/REPOSITORY, or leave out --key")
    if push:
        reference = parse_reference(push)
        registry = Registry(reference, read_credentials(reference.host), registry_ca)
        registry.check_access()  # a wrong password is an error now, not after the run
    run = WarmRun(
        chosen, image or f"slipway:{chosen.identifier}", tuple(command or ()), tuple(volume or ()), tuple(env or ())
    )
    path = output or folder / f"{chosen.identifier}.warm.tar.zst"
    cache = make_cache(run, open_engine(engine), path)
    if output is None:
        path = path.rename(folder / f"{cache.name}.tar.zst")
    signer = Signer(key) if key else None
    pushed = str(push_archive(registry, path, signer, registry_ca)) if registry else None
    errors.print(
        escape(
            f"{cache.files} files, {cache.bytes / 1e6:.1f} MB, packed {path.stat().st_size / 1e6:.1f} MB; "
            f"no name or path of this host, no secret of this job in it"
        )
    )
    if as_json:
        emit({**asdict(cache), "file": str(path), "pushed": pushed})
    else:
        sys.stdout.write(f"{path}\n" + (f"{pushed}\n" if pushed else ""))
