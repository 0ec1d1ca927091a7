"""Finds a variant's lock, and checks that it matches the matrix and the templates."""

import hashlib
import os
from pathlib import Path

from buildkit.errors import LockError, MatrixError
from buildkit.recipe.dockerfile import render_dockerfile
from buildkit.recipe.lock import Lock, parse_lock
from buildkit.recipe.matrix import EXTENDED_SUFFIX, Matrix, Variant
from buildkit.recipe.platform import AMD64
from buildkit.recipe.project import INSTALLED
from buildkit.recipe.toml import read_toml

USERS = "slipway-locks"  # the folder of locks beside a slipway.toml


def lock_path(matrix: Matrix, variant: Variant) -> Path:
    """The lock's file: beside the slipway.toml that the variant comes from, else the project's.

    It is the user's own for a variant that the installed package has no lock for.
    """
    name = Path(variant.target, f"{variant.name}.txt")
    if variant.origin:
        return variant.origin.parent / USERS / name
    shipped = matrix.images / "locks" / name
    return shipped if matrix.root != INSTALLED or shipped.is_file() else user_locks() / name


def extension_lock_path(matrix: Matrix, variant: Variant) -> Path | None:
    """The file for the lock of the variant's extension; None unless all of the extension stands in a slipway.toml."""
    if matrix.user is None or variant.extension is None or variant.extension != matrix.user.extension:
        return None
    return matrix.user.path.parent / USERS / variant.target / f"{variant.name}{EXTENDED_SUFFIX}.txt"


def user_locks() -> Path:
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "slipway" / "locks"


def lock_name(matrix: Matrix, variant: Variant) -> str:
    """The lock's path for messages and provenance, relative to the project or slipway.toml that it belongs to."""
    path = lock_path(matrix, variant)
    root = variant.origin.parent if variant.origin else matrix.root
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def lock_command(variant: Variant) -> str:
    """The command that makes the lock."""
    return f"buildkit lock --target {variant.target} --variant {variant.name}"


def inputs(matrix: Matrix, variant: Variant) -> list[str]:
    """The requirements to resolve: the variant's pins, and what the project's own code imports in every image."""
    path = matrix.root / "pyproject.toml"
    try:
        common = [str(requirement) for requirement in read_toml(path)["project"]["optional-dependencies"]["image"]]
    except (LookupError, TypeError) as error:
        raise MatrixError(f"{path} has no extra `image`", "list there what the project's own code imports") from error
    return [*variant.requirements, *common]


def inputs_digest(matrix: Matrix, variant: Variant) -> str:
    base = [variant.base.image, variant.base.python, variant.base.glibc, str(variant.base.bootstrap)]
    base += sorted(variant.packages)
    if variant.platform != AMD64:
        base.append(variant.platform.name)
    left_out = [*sorted(variant.exclude), *sorted(variant.prune), *sorted(variant.source_only)]
    return sha256("\n".join([*base, *sorted(inputs(matrix, variant)), *left_out]))


def template_digest(matrix: Matrix, variant: Variant) -> str:
    """Digest of the Dockerfile without comments and labels, which change no layer."""
    text = render_dockerfile(matrix, variant, variant.base.providers[-1], {})
    text += (matrix.images / "templates" / "install-wheels").read_text()
    return sha256("\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def find_lock(matrix: Matrix, variant: Variant) -> Lock:
    """The variant's lock as it is, current or not; an empty one when there is none. Raises `LockError`."""
    return parse_lock_file(lock_path(matrix, variant), variant)


def parse_lock_file(path: Path, variant: Variant) -> Lock:
    """The lock in a file; an empty one when there is none. Raises `LockError`."""
    if not path.exists():
        return Lock()
    try:
        return parse_lock(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{path} cannot be read: {error}", f"make it again with `{lock_command(variant)}`") from error


def locked_instead(matrix: Matrix, variant: Variant) -> str:
    """The variants of the same target that have a lock, as the end of a hint."""
    variants = matrix.targets[variant.target].variants.values()
    others = [other for other in variants if lock_path(matrix, other.for_platform(variant.platform)).exists()]
    named = [f"--variant {other.name}" + ("" if other.trains else ", which cannot train") for other in others]
    return f"; a lock is here for {' and '.join(named)}" if named else ""


def read_lock(matrix: Matrix, variant: Variant) -> Lock:
    """The variant's lock. Raises `LockError` when there is none, or the matrix or the templates have changed since."""
    path, hint = lock_name(matrix, variant), f"run `{lock_command(variant)}`"
    lock = find_lock(matrix, variant)
    if not lock.text:
        raise LockError(f"{path}: no lock for {variant.stock.identifier}", hint + locked_instead(matrix, variant))
    if lock.inputs != inputs_digest(matrix, variant):
        raise LockError(f"{path} does not match images/matrix.toml and pyproject.toml any more", hint)
    if lock.template != template_digest(matrix, variant):
        raise LockError(f"{path} was made for other templates than images/ has now", hint)
    return lock
