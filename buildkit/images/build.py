"""Builds an image: copies all inputs into one context folder, from which the engine builds the layers."""

import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from uv import find_uv_bin

from buildkit.errors import BuildError, DiskError
from buildkit.host.certificates import with_system_ca
from buildkit.host.settings import HostSettings, as_shell, read_host
from buildkit.images.plan import CODE, Plan, make_plan, record_build
from buildkit.recipe.dockerfile import image_labels, image_manifest, render_dockerfile
from buildkit.recipe.lock import Lock
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import Base, Matrix, Variant
from buildkit.recipe.project import code_folder
from buildkit.recipe.wheel_layers import split_by_layer
from buildkit.running.engine import BuildRequest, ContainerEngine
from buildkit.supply.base import bootstrap, choose_provider
from buildkit.supply.vendor_indexes import with_vendor_indexes
from buildkit.supply.wheels import local_wheels
from buildkit.warming.cache import Key, refuse_other_lock
from buildkit.warming.source import Source, open_cache

log = logging.getLogger(__name__)

CA_IN_BUILD = "/run/slipway/ca.pem"
LAUNCH = """#!/opt/slipway/venv/bin/python
import sys

from entrypoints.__main__ import main

sys.exit(main())
"""


@dataclass(frozen=True)
class BuildResult:
    """`size` is in bytes, uncompressed; `seconds` is the whole build."""

    target: str
    variant: str
    tags: tuple[str, ...]
    image_id: str
    size: int
    seconds: float
    base_provider: str


def image_tags(matrix: Matrix, variant: Variant, lock: Lock) -> tuple[str, ...]:
    """The tags of a variant: its target's name if it is the default, its own name, and one with the lock's digest."""
    name = f"slipway:{variant.identifier}"
    moving = (f"slipway:{variant.target}",) if matrix.is_default(variant) else ()
    return (*moving, name, f"{name}-{lock.digest[:12]}")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipway"


def build_image(
    matrix: Matrix,
    variant: Variant,
    engine: ContainerEngine,
    base: str = "auto",
    tags: tuple[str, ...] = (),
    no_cache: bool = False,
    progress: str = "auto",
    warm: Source | None = None,
) -> BuildResult:
    """Builds and tags the image. `tags` are added to the variant's own; `warm` names a warm cache to add.

    Raises a `BuildkitError` for a stale lock, too little disk space, an unavailable base, a warm cache of another lock,
    or a failing step.
    """
    start = time.monotonic()
    lock = read_lock(matrix, variant)
    plan = make_plan(matrix, variant, lock, cache_folder())
    check_disk(matrix, variant, engine, plan)
    names = (*image_tags(matrix, variant, lock), *tags)
    folder = warm_folder(warm, variant, lock) if warm else None
    with prepared(matrix, variant, engine, lock, base, folder) as (request, provider):
        engine.build(replace(request, tags=names, no_cache=no_cache, progress=progress))
    record_build(plan, cache_folder())
    image = engine.find(names[0])
    if image is None:
        raise BuildError(f"{engine.name} built the image but cannot find {names[0]}", f"see `{engine.name} images`")
    return BuildResult(variant.target, variant.name, names, image.id, image.size, time.monotonic() - start, provider)


def warm_folder(source: Source, variant: Variant, lock: Lock) -> Path:
    """The folder of an unpacked warm cache. Raises `WarmCacheError` if it was made with another lock.

    Which GPUs and driver it fits, `launch` checks on each node.
    """
    digest = f"sha256:{lock.digest}"
    cache, folder = open_cache(source, cache_folder() / "warm", variant.target, Key(digest, (), ""))
    refuse_other_lock(cache, digest)
    return folder


@contextmanager
def prepared(
    matrix: Matrix, variant: Variant, engine: ContainerEngine, lock: Lock, base: str, warm: Path | None = None
) -> Iterator[tuple[BuildRequest, str]]:
    """A build request with its context and secrets in place, and the provider of its base.

    `warm` is the folder of an unpacked warm cache.
    """
    host = with_vendor_indexes(read_host(), variant)
    provider, reason = choose_provider(variant.base, base, engine, lock)
    log.info("base: %s (%s)", provider, reason)
    context = cache_folder() / "contexts" / variant.identifier
    with only_build_of(context), tempfile.TemporaryDirectory(prefix="slipway-secrets-") as folder:
        stage(context, matrix, variant, lock, provider, host, warm)
        secrets = write_secrets(Path(folder), variant.base, host)
        arguments = {"SOURCE_DATE_EPOCH": str(lock.epoch), **host.proxies}
        yield BuildRequest(context, (), secrets, arguments), provider


@contextmanager
def only_build_of(context: Path) -> Iterator[None]:
    """Waits for another build of the same variant, which uses the same context: the engine sends only what changed."""
    context.parent.mkdir(parents=True, exist_ok=True)
    with context.with_name(f"{context.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("build: waiting for another build of %s", context.name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_disk(matrix: Matrix, variant: Variant, engine: ContainerEngine, plan: Plan) -> None:
    """Raises `DiskError` when the build needs more space than is free; a change of code alone needs very little."""
    full = variant.disk_gib or matrix.targets[variant.target].disk_gib
    free, needed = engine.free_bytes(), 1 if set(plan.changed) <= {"code"} else full
    if free is not None and free < needed * 2**30:
        raise DiskError(
            f"{free / 2**30:.1f} GiB free where the engine keeps images; {variant.identifier} needs {needed} GiB",
            "free some space: `docker system df` shows what uses it, `docker system prune` removes unused data",
        )


def stage(
    context: Path,
    matrix: Matrix,
    variant: Variant,
    lock: Lock,
    provider: str,
    host: HostSettings,
    warm: Path | None = None,
) -> None:
    """Fills the build context with exactly what goes into the image or is mounted during the build."""
    shutil.rmtree(context, ignore_errors=True)
    (context / "tools").mkdir(parents=True)
    manifest = image_manifest(matrix, variant, provider, lock)
    labels = image_labels(matrix, variant, manifest)
    (context / "Dockerfile").write_text(render_dockerfile(matrix, variant, provider, labels, lock, bool(warm)))
    for name, patterns in (("prune", variant.prune), ("source-only", variant.source_only)):
        (context / f"{name}.txt").write_text("".join(f"{path}\n" for path in patterns))
    shutil.copy2(matrix.images / "templates" / "install-wheels", context / "install-wheels")
    stage_wheels(context, matrix, lock, host)
    (context / "image.json").write_text(json.dumps(manifest, indent=2) + "\n")
    (context / "launch").write_text(LAUNCH)
    (context / "launch").chmod(0o755)
    link(Path(find_uv_bin()), context / "tools" / "uv")
    for package in CODE:
        shutil.copytree(
            code_folder(matrix.root, package), context / "app" / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    stage_aliases(matrix.images / "aliases", context)
    for folder in ("app", "workspace"):
        fix_modes(context / folder)
    if warm:
        shutil.copytree(warm, context / "warm", copy_function=lambda source, target: link(Path(source), Path(target)))
    if provider == "bootstrap":
        link(bootstrap(variant, cache_folder(), lock.debs, lock.epoch).tar, context / "rootfs.tar")


def fix_modes(folder: Path) -> None:
    """Everybody may read; only the owner writes. A checkout has the modes of its owner's umask."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def stage_aliases(aliases: Path, context: Path) -> None:
    """verl's names: its modules beside the code, and the files that its launch lines read in the working directory."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(aliases / "verl", context / "app" / "verl", ignore=ignored)
    shutil.copytree(aliases / "examples", context / "workspace" / "examples", ignore=ignored)
    environment = context / "workspace" / "verl" / "trainer" / "runtime_env.yaml"
    environment.parent.mkdir(parents=True)
    shutil.copy2(aliases / "verl" / "trainer" / "runtime_env.yaml", environment)


def stage_wheels(context: Path, matrix: Matrix, lock: Lock, host: HostSettings) -> None:
    """A requirements file for each layer, and those of its wheels that lie on this host."""
    (context / "requirements").mkdir()
    for name, pins in split_by_layer(lock.pins, matrix.wheel_layers).items():
        (context / "requirements" / f"{name}.txt").write_text("".join(pin.text for pin in pins))
        folder = context / "wheels" / name
        folder.mkdir(parents=True)
        for wheel in local_wheels(pins, host):
            link(wheel, folder / wheel.name)


def serves(host: HostSettings, base: Base) -> bool:
    """Whether the host's apt sources are those of the base's release."""
    return base.bootstrap is not None and base.bootstrap["suite"] in host.apt_sources


def link(source: Path, target: Path) -> None:
    """A hard link where the file system allows it, else a copy."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def write_secrets(folder: Path, base: Base, host: HostSettings) -> dict[str, Path]:
    """The host's settings as files that the build can read. Absent ones are empty, so that every mount works."""
    contents = {
        "host_environment": as_shell(host.build_environment(CA_IN_BUILD)),
        "ca_bundle": with_system_ca(host.ca_bundle) if host.ca_bundle else "",
        "apt_sources": host.apt_sources if serves(host, base) else "",
    }
    paths = {name: folder / name for name in contents}
    for name, path in paths.items():
        path.write_text(contents[name])
    return paths
