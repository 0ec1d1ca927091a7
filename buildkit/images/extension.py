"""A user's additions to an image: locked against the image's own lock, and staged for the build.

The lock of what `[extend]` in a slipway.toml names lies beside that file; what only options of `build` name is resolved
at every build. The image carries it as /etc/slipway/extension.txt either way.
"""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

from buildkit.errors import ExtensionError, LockError
from buildkit.images.packages import MirrorMovedError, PackageSource
from buildkit.images.plan import CHECKS
from buildkit.recipe.extension import Extension, LockedExtension
from buildkit.recipe.lock import Lock, format_lock, parse_lock
from buildkit.recipe.lock_file import extension_lock_path, lock_command, parse_lock_file
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.supply.extension_wheels import resolve_extension

log = logging.getLogger(__name__)


def lock_extension(source: PackageSource, locked: bool = False, upgrade: bool = False) -> LockedExtension | None:
    """The extension of the source's variant with its lock, which is resolved if it is not current; None without one.

    With `locked`, only a current lock will do. `upgrade` takes the newest versions that fit. Raises `ExtensionError`
    for what contradicts the image or cannot be had, `LockError` for what `locked` refuses and for an unreadable index.
    """
    matrix, variant, lock = source.matrix, source.variant, source.lock
    extension = variant.extension
    if extension is None:
        return None
    try:
        known = None if upgrade else read_extension_lock(matrix, variant, lock)
    except LockError:
        if locked:
            raise
        known = None
    path = extension_lock_path(matrix, variant)
    if known:
        try:
            return replace(known, debs=source.files(known.lock.debs))
        except MirrorMovedError as moved:
            if locked:
                raise LockError(str(moved), f"run `{lock_command(variant)}`, and commit the lock") from moved
            log.warning("extension: %s; resolving the Debian packages again", moved)
        new = with_packages(known.lock, extension, source)
    else:
        preferred = "" if upgrade else find_extension_lock(path, variant).requirements
        pins, wheels = resolve_extension(variant.stock, extension, lock, source.host, preferred)
        new = with_packages(replace(empty_lock(variant, lock), pins=pins, wheels=wheels), extension, source)
        refuse_failures(matrix, variant, lock, new)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(new.text)
        log.info("extension: wrote %s", path)
    return LockedExtension(extension, new, source.files(new.debs))


def read_extension_lock(matrix: Matrix, variant: Variant, lock: Lock) -> LockedExtension | None:
    """The variant's extension with its current lock, without files; None without an extension.

    Raises `LockError` when the lock is missing, or its inputs or the image's lock have changed since.
    """
    extension = variant.extension
    if extension is None:
        return None
    path = extension_lock_path(matrix, variant)
    empty, written = empty_lock(variant, lock), find_extension_lock(path, variant)
    if not extension.resolved:
        return LockedExtension(extension, with_text(empty, variant))
    if written.inputs == empty.inputs:
        return LockedExtension(extension, written)
    if path is None:
        raise LockError(
            f"what is added to {variant.stock.identifier} by options alone has no lock",
            "name it under [extend] in a slipway.toml; `buildkit lock` then writes its lock beside that file",
        )
    state = "was made for other requirements or another lock of the image" if written.text else "is missing"
    raise LockError(f"{path} {state}", f"run `{lock_command(variant)}`")


def find_extension_lock(path: Path | None, variant: Variant) -> Lock:
    """The lock as it is, current or not; an empty one when there is none. Raises `LockError`."""
    return parse_lock_file(path, variant) if path else Lock()


def empty_lock(variant: Variant, lock: Lock) -> Lock:
    """A lock of nothing on top of the image with this lock."""
    inputs = inputs_digest(variant.extension or Extension(), lock)
    return Lock(inputs=inputs, base=f"slipway:{variant.stock.identifier}", base_digest=f"sha256:{lock.digest}")


def inputs_digest(extension: Extension, lock: Lock) -> str:
    hashes = (f"{name} {' '.join(sorted(accepted))}" for name, accepted in sorted(extension.hashes.items()))
    lines = [lock.digest, *sorted(extension.requirements), *hashes, *sorted(extension.packages)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def with_packages(lock: Lock, extension: Extension, source: PackageSource) -> Lock:
    """The lock with the newest Debian packages that the extension names, and its text."""
    debs, size = source.newest(extension.packages) if extension.packages else ((), 0)
    return with_text(replace(lock, debs=debs, base_bytes=size), source.variant)


def with_text(lock: Lock, variant: Variant) -> Lock:
    return parse_lock(format_lock(lock, variant.identifier))


def refuse_failures(matrix: Matrix, variant: Variant, lock: Lock, added: Lock) -> None:
    """Refuses additions with which the pins no longer fit together, such as a second NCCL or CUDA."""
    for check in CHECKS:
        before, after = (check(matrix, variant, pins) for pins in (lock, lock.extended_by(added)))
        if after.status == "fail" and before.status != "fail":
            raise ExtensionError(
                f"with what is added, {variant.stock.identifier} fails the check `{after.name}`: {after.detail}",
                "leave out the distribution that brings it",
            )
