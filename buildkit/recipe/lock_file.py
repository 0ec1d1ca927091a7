"""Where a variant's lock lies, and whether it still matches the matrix and the templates."""

import hashlib
import tomllib
from pathlib import Path

from buildkit.errors import LockError
from buildkit.recipe.dockerfile import render_dockerfile
from buildkit.recipe.lock import Lock, parse_lock
from buildkit.recipe.matrix import Matrix, Variant


def lock_path(matrix: Matrix, variant: Variant) -> Path:
    return matrix.images / "locks" / variant.target / f"{variant.name}.txt"


def inputs(matrix: Matrix, variant: Variant) -> list[str]:
    """The requirements to resolve: the variant's pins, and what the project's own code imports in every image."""
    project = tomllib.loads((matrix.root / "pyproject.toml").read_text())
    common: list[str] = project["project"]["optional-dependencies"]["image"]
    return [*variant.requirements, *common]


def inputs_digest(matrix: Matrix, variant: Variant) -> str:
    base = [variant.base.image, variant.base.python, str(variant.base.bootstrap), *sorted(variant.packages)]
    left_out = [*sorted(variant.exclude), *sorted(variant.prune), *sorted(matrix.source_only)]
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
    path = lock_path(matrix, variant)
    return parse_lock(path.read_text()) if path.is_file() else Lock()


def read_lock(matrix: Matrix, variant: Variant) -> Lock:
    """The variant's lock. Raises `LockError` when there is none, or the matrix or the templates have changed since."""
    path = lock_path(matrix, variant).relative_to(matrix.root)
    hint = f"run `buildkit lock --target {variant.target} --variant {variant.name}`"
    lock = find_lock(matrix, variant)
    if not lock.text:
        raise LockError(f"{path}: no lock for {variant.identifier}", hint)
    if lock.inputs != inputs_digest(matrix, variant):
        raise LockError(f"{path} does not match images/matrix.toml and pyproject.toml any more", hint)
    if lock.template != template_digest(matrix, variant):
        raise LockError(f"{path} was made for other templates than images/ has now", hint)
    return lock
