"""The command `render`."""

import sys

from rich.markup import escape

from buildkit.commands.options import AsJson, BaseChoice, Project, TargetName, VariantName, emit, errors, open_matrix
from buildkit.errors import BuildkitError, UsageError
from buildkit.images.extension import read_extension_lock
from buildkit.images.parent import OWN_STAGE
from buildkit.recipe.dockerfile import image_labels, image_manifest, render_dockerfile, render_extension
from buildkit.recipe.lock import Lock
from buildkit.recipe.lock_file import read_lock
from buildkit.recipe.matrix import Matrix, Variant


def render(
    target: TargetName,
    variant: VariantName = None,
    base: BaseChoice = "auto",
    as_json: AsJson = False,
    project: Project = None,
) -> None:
    """Print the Dockerfile of a variant. `--base auto` shows the preferred provider."""
    matrix = open_matrix(project)
    chosen = matrix.variant(target, variant)
    provider = chosen.base.providers[0] if base == "auto" else base
    if provider not in chosen.base.providers:
        raise UsageError(
            f"base {chosen.base.name} has no provider `{base}`", f"one of: auto, {', '.join(chosen.base.providers)}"
        )
    locked = lock_or_empty(matrix, chosen)
    labels = image_labels(matrix, chosen.stock, image_manifest(matrix, chosen.stock, provider, locked))
    text = render_dockerfile(matrix, chosen.stock, provider, labels, locked)
    if locked.text and (added := read_extension_lock(matrix, chosen, locked)):
        labels = image_labels(matrix, chosen, image_manifest(matrix, chosen, provider, locked, added))
        text += f"\n\n{render_extension(matrix, chosen, OWN_STAGE, labels, added)}"
    if as_json:
        emit({"target": chosen.target, "variant": chosen.name, "base": provider, "dockerfile": text})
    else:
        sys.stdout.write(text)


def lock_or_empty(matrix: Matrix, variant: Variant) -> Lock:
    """The lock, or an empty one: a Dockerfile can be shown before its variant is locked."""
    try:
        return read_lock(matrix, variant)
    except BuildkitError as error:
        errors.print(f"[yellow]warning:[/] {escape(str(error))}")
        return Lock()
