"""Builds an image: copies all inputs into one context folder, from which the engine builds the layers."""

import fcntl
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

from buildkit.errors import BuildError, DiskError, LockError
from buildkit.host.settings import read_host
from buildkit.images.context import stage, stage_extension
from buildkit.images.extension import lock_extension
from buildkit.images.packages import PackageSource
from buildkit.images.parent import OWN_STAGE, Parent
from buildkit.images.plan import Plan, make_plan, record_build
from buildkit.images.secrets import write_secrets
from buildkit.recipe.extension import LockedExtension
from buildkit.recipe.lock import Lock, PackageChange
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import EXTENDED_SUFFIX, Matrix, Variant
from buildkit.running.engine import BuildRequest, ContainerEngine
from buildkit.supply.base import bootstrap, choose_provider, drift, shown
from buildkit.supply.vendor_indexes import with_vendor_indexes
from buildkit.warming.cache import Key, refuse_other_lock
from buildkit.warming.source import Source, open_cache

log = logging.getLogger(__name__)

FIELD = re.compile(r"^(Package|Status|Version): (.+)$", re.MULTILINE)
INSTALLED = "install ok installed"


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
    """A build request with its context and secrets in place, the provider of its base, the lock, and what is added.

    The lock's `changes` say how the base differs from the locked one.
    """

    request: BuildRequest
    provider: str
    lock: Lock
    extension: LockedExtension | None = None


def image_tags(
    matrix: Matrix, variant: Variant, lock: Lock, extension: LockedExtension | None = None
) -> tuple[str, ...]:
    """The tags of a variant: its target's name if it is the default, its own name, and one with the locks' digest.

    Those of an extended image have other names: `slipway:cpu` stays as it is. An image whose base is not the locked
    one does not get the last.
    """
    name = f"slipway:{variant.identifier}"
    suffix = EXTENDED_SUFFIX if extension else ""
    moving = (f"slipway:{variant.target}{suffix}",) if matrix.is_default(variant) else ()
    digest = extension.digest if extension else lock.digest
    return (*moving, name, *(() if lock.changes else (f"{name}-{digest[:12]}",)))


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipway"


@dataclass(frozen=True)
class BuildOptions:
    """`base` is a provider of the base, or `auto`; `tags` are added to the variant's own; `warm` names a warm cache.

    Where the mirror has moved on, newer packages take the place of the locked ones, and an extension without a current
    lock is resolved; `only_locked` refuses both. `parent` is an image of the variant to extend, instead of building all
    layers.
    """

    base: str = "auto"
    tags: tuple[str, ...] = ()
    no_cache: bool = False
    progress: str = "auto"
    warm: Source | None = None
    only_locked: bool = False
    parent: Parent | None = None


def build_image(
    matrix: Matrix, variant: Variant, engine: ContainerEngine, options: BuildOptions | None = None
) -> BuildResult:
    """Builds and tags the image.

    Raises a `BuildkitError` for a stale lock, too little disk space, an unavailable base, a warm cache of another lock,
    an extension that contradicts the lock, or a failing step.
    """
    options = options or BuildOptions()
    start = time.monotonic()
    lock = read_lock(matrix, variant)
    if options.parent is None:
        check_disk(matrix, variant, engine, make_plan(matrix, variant, lock, cache_folder()))
    with prepared(matrix, variant, engine, lock, options) as build:
        names = (*image_tags(matrix, variant, build.lock, build.extension), *options.tags)
        engine.build(replace(build.request, tags=names, no_cache=options.no_cache, progress=options.progress))
    if options.parent is None:
        record_build(make_plan(matrix, variant, lock, cache_folder(), build.extension), build.lock, cache_folder())
    image = engine.find(names[0])
    if image is None:
        raise BuildError(f"{engine.name} built the image but cannot find {names[0]}", f"see `{engine.name} images`")
    seconds = time.monotonic() - start
    changes = build.lock.changes
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
    options: BuildOptions,
) -> Iterator[PreparedBuild]:
    """A build that is ready to start; tags, cache and progress are not set.

    Raises `LockError` if an image of `only_locked` packages cannot be had.
    """
    parent, only_locked = options.parent, options.only_locked
    warm = warm_folder(options.warm, variant, lock) if options.warm else None
    host = with_vendor_indexes(read_host(), variant)
    provider, reason = (parent.provider, "") if parent else choose_provider(variant.base, options.base, engine, lock)
    log.info("base: %s", parent.reference if parent else f"{provider} ({reason})")
    apt = PackageSource(
        matrix, variant, lock, engine, host, parent.reference if parent else provider, cache_folder(), only_locked
    )
    context = cache_folder() / "contexts" / variant.identifier
    with only_build_of(context), tempfile.TemporaryDirectory(prefix="slipway-secrets-") as folder:
        rootfs = None
        if parent:
            if only_locked and parent.changes:
                raise LockError(
                    f"the base of {parent.reference} is not the locked one: {shown(parent.changes)}",
                    "name an image that has the locked base, or leave out --locked",
                )
            lock = replace(lock, changes=parent.changes)
        elif provider == "bootstrap":
            made = bootstrap(variant, cache_folder(), lock.debs, lock.epoch, only_locked)
            rootfs, lock = made.tar, lock.with_packages(made.debs)
        extension = lock_extension(apt, only_locked)

        def fill(lock: Lock) -> None:
            shutil.rmtree(context, ignore_errors=True)
            parts = []
            if parent is None:
                parts.append(stage(context, matrix, variant.stock, lock, provider, host, warm, rootfs))
            if extension:
                origin = parent or Parent(OWN_STAGE, provider)
                parts.append(stage_extension(context, matrix, variant, lock, extension, origin, host))
            (context / "Dockerfile").write_text("\n\n".join(parts))

        fill(lock)
        arguments = {"SOURCE_DATE_EPOCH": str(lock.epoch), **host.proxies}
        request = BuildRequest(context, (), write_secrets(Path(folder), variant.base, host), arguments)
        adds = parent is None and provider == "registry" and lock.debs
        if adds and (changes := added_changes(engine, request, lock)):
            if only_locked:
                raise drift(variant, changes)
            log.warning("base: %s", drift(variant, changes))
            lock = replace(lock, changes=changes)
            fill(lock)
        yield PreparedBuild(request, provider, lock, extension)


def added_changes(engine: ContainerEngine, request: BuildRequest, lock: Lock) -> tuple[PackageChange, ...]:
    """Differences between the packages that a build adds to a public image and the locked ones."""
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


def renew_extension(matrix: Matrix, variant: Variant, engine: ContainerEngine, upgrade: bool) -> None:
    """Brings the lock of the variant's extension up to date. Raises as `lock_extension` does."""
    host, lock = with_vendor_indexes(read_host(), variant), read_lock(matrix, variant)
    provider, _ = choose_provider(variant.base, "auto", engine, lock)
    lock_extension(PackageSource(matrix, variant, lock, engine, host, provider, cache_folder()), upgrade=upgrade)


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
