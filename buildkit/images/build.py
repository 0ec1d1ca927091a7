"""Builds an image: copies all inputs into one context folder, from which the engine builds the layers."""

import fcntl
import json
import logging
import os
import re
import secrets
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
from buildkit.recipe.lock import Lock, PackageChange
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import Base, Matrix, Variant
from buildkit.recipe.project import code_folder
from buildkit.recipe.wheel_layers import split_by_layer
from buildkit.running.engine import BuildRequest, ContainerEngine
from buildkit.supply.base import bootstrap, choose_provider, drift, preferences
from buildkit.supply.vendor_indexes import with_vendor_indexes
from buildkit.supply.wheels import local_wheels
from buildkit.warming.cache import Key, refuse_other_lock
from buildkit.warming.source import Source, open_cache

log = logging.getLogger(__name__)

CA_IN_BUILD = "/run/slipway/ca.pem"
FIELD = re.compile(r"^(Package|Status|Version): (.+)$", re.MULTILINE)
INSTALLED = "install ok installed"
LAUNCH = """#!/opt/slipway/venv/bin/python
import sys

from entrypoints.__main__ import main

sys.exit(main())
"""


@dataclass(frozen=True)
class BuildResult:
    """`size` is in bytes, uncompressed; `seconds` is the whole build.

    `base_changes` are the Debian packages that differ from the lock, because the mirror had moved on.
    """

    target: str
    variant: str
    tags: tuple[str, ...]
    image_id: str
    size: int
    seconds: float
    base_provider: str
    base_changes: tuple[PackageChange, ...] = ()


@dataclass(frozen=True)
class PreparedBuild:
    """A build request with its context and secrets in place, the provider of its base, and the lock.

    The lock's `changes` say how the base differs from the locked one.
    """

    request: BuildRequest
    provider: str
    lock: Lock


def image_tags(matrix: Matrix, variant: Variant, lock: Lock) -> tuple[str, ...]:
    """The tags of a variant: its target's name if it is the default, its own name, and one with the lock's digest.

    An image whose base is not the locked one does not get the last.
    """
    name = f"slipway:{variant.identifier}"
    moving = (f"slipway:{variant.target}",) if matrix.is_default(variant) else ()
    return (*moving, name, *(() if lock.changes else (f"{name}-{lock.digest[:12]}",)))


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
    only_locked: bool = False,
) -> BuildResult:
    """Builds and tags the image. `tags` are added to the variant's own; `warm` names a warm cache to add.

    Where the mirror has moved on, newer packages take the place of the locked ones; `only_locked` refuses to.
    Raises a `BuildkitError` for a stale lock, too little disk space, an unavailable base, a warm cache of another lock,
    or a failing step.
    """
    start = time.monotonic()
    lock = read_lock(matrix, variant)
    plan = make_plan(matrix, variant, lock, cache_folder())
    check_disk(matrix, variant, engine, plan)
    folder = warm_folder(warm, variant, lock) if warm else None
    with prepared(matrix, variant, engine, lock, base, folder, only_locked) as build:
        names = (*image_tags(matrix, variant, build.lock), *tags)
        engine.build(replace(build.request, tags=names, no_cache=no_cache, progress=progress))
    changes = build.lock.changes
    record_build(plan, build.lock, cache_folder())
    image = engine.find(names[0])
    if image is None:
        raise BuildError(f"{engine.name} built the image but cannot find {names[0]}", f"see `{engine.name} images`")
    seconds = time.monotonic() - start
    return BuildResult(variant.target, variant.name, names, image.id, image.size, seconds, build.provider, changes)


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
    matrix: Matrix,
    variant: Variant,
    engine: ContainerEngine,
    lock: Lock,
    base: str,
    warm: Path | None = None,
    only_locked: bool = False,
) -> Iterator[PreparedBuild]:
    """A build that is ready to start. `warm` is the folder of an unpacked warm cache.

    Raises `LockError` if the base is to have `only_locked` packages and cannot be had.
    """
    host = with_vendor_indexes(read_host(), variant)
    provider, reason = choose_provider(variant.base, base, engine, lock)
    log.info("base: %s (%s)", provider, reason)
    context = cache_folder() / "contexts" / variant.identifier
    with only_build_of(context), tempfile.TemporaryDirectory(prefix="slipway-secrets-") as folder:
        rootfs = None
        if provider == "bootstrap":
            made = bootstrap(variant, cache_folder(), lock.debs, lock.epoch, only_locked)
            rootfs, lock = made.tar, lock.with_packages(made.debs)
        stage(context, matrix, variant, lock, provider, host, warm, rootfs)
        arguments = {"SOURCE_DATE_EPOCH": str(lock.epoch), **host.proxies}
        request = BuildRequest(context, (), write_secrets(Path(folder), variant.base, host), arguments)
        if provider == "registry" and lock.debs and (changes := added_changes(engine, request, lock)):
            if only_locked:
                raise drift(variant, changes)
            log.warning("base: %s", drift(variant, changes))
            lock = replace(lock, changes=changes)
            stage(context, matrix, variant, lock, provider, host, warm)
        yield PreparedBuild(request, provider, lock)


def added_changes(engine: ContainerEngine, request: BuildRequest, lock: Lock) -> tuple[PackageChange, ...]:
    """How the packages that a build adds to a public image differ from the locked ones."""
    before, after = (installed_versions(engine, request, name) for name in ("vendor", "base"))
    locked = {deb.name: deb.version for deb in lock.debs}
    added = {name: version for name, version in after.items() if before.get(name) != version}
    return tuple(
        PackageChange(name, locked.get(name, ""), version)
        for name, version in sorted(added.items())
        if locked.get(name) != version
    )


def installed_versions(engine: ContainerEngine, request: BuildRequest, name: str) -> dict[str, str]:
    """The Debian packages of a stage of the Dockerfile, which is built for that."""
    tag = f"slipway:stage-{secrets.token_hex(6)}"
    engine.build(replace(request, tags=(tag,), stage=name))
    try:
        records = engine.read_file(tag, "/var/lib/dpkg/status").decode(errors="replace")
    finally:
        engine.call("rmi", tag)
    packages = (dict(FIELD.findall(paragraph)) for paragraph in records.split("\n\n"))
    return {fields["Package"]: fields["Version"] for fields in packages if fields.get("Status") == INSTALLED}


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
    rootfs: Path | None = None,
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
    if rootfs:
        link(rootfs, context / "rootfs.tar")
    if provider == "registry":
        (context / "preferences").write_text(preferences(variant, lock.debs))


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
