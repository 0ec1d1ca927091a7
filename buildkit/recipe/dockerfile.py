"""Renders a variant's Dockerfile from `images/templates/`, and the manifest and labels of its image."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

from buildkit.errors import MatrixError
from buildkit.recipe.extension import PLACE, LockedExtension
from buildkit.recipe.lock import STANDS_FOR, Lock, PackageChange
from buildkit.recipe.matrix import Matrix, Variant, WheelLayer
from buildkit.recipe.project import project_version, source_date, source_revision
from buildkit.recipe.wheel_layers import download_caches

NOT_LOCKED = Lock()
CHANGES = "dev.slipway.base.changes"  # label: how the image's Debian packages differ from its lock


def render_dockerfile(
    matrix: Matrix,
    variant: Variant,
    provider: str,
    labels: dict[str, str],
    lock: Lock = NOT_LOCKED,
    warm: bool = False,
) -> str:
    """The complete Dockerfile, with the locked base; with `warm`, also a layer of compiled code.

    Raises `MatrixError` with template and line when a template is wrong.
    """
    values = {
        "target": variant.target,
        "variant": variant,
        "provider": provider,
        "download_caches": download_caches(lock.pins, matrix.wheel_layers),
        "env": matrix.env(variant.target, variant.debug),
        "toolkit": variant.compiles_cuda,
        "labels": labels,
        "warm": warm,
        **base_values(variant, lock),
    }
    return render(matrix, "Dockerfile.j2", values)


def render_extension(
    matrix: Matrix, variant: Variant, parent: str, labels: dict[str, str], added: LockedExtension
) -> str:
    """The part of a Dockerfile that puts a user's additions on `parent`, an image or an earlier stage."""
    (downloads,) = download_caches(added.lock.pins, (WheelLayer("extension", ("*",)),)).values()
    values = {
        "parent": parent,
        "packages": added.lock.debs,
        "downloads": downloads if added.lock.pins else "",
        "python": variant.base.python,
        "folders": added.extension.folders,
        "projects": added.extension.project_paths,
        "place": PLACE,
        "labels": labels,
    }
    return render(matrix, "extension.j2", values)


def render_packages(matrix: Matrix, variant: Variant, parent: str, names: Iterable[str], lock: Lock) -> str:
    """A Dockerfile that downloads Debian packages in the variant's base; `parent` is its provider, or an image."""
    kind = parent if parent in variant.base.providers else "image"
    values = {"names": list(names), "base": kind, "image": parent, **base_values(variant, lock)}
    return render(matrix, "packages.j2", values)


def base_values(variant: Variant, lock: Lock) -> dict[str, Any]:
    return {"base_image": lock.base_reference or variant.base.image, "packages": list(variant.packages)}


def render(matrix: Matrix, template: str, values: dict[str, Any]) -> str:
    loader = FileSystemLoader(matrix.images / "templates")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=False)
    environment.filters["quoted"] = quoted
    try:
        return environment.get_template(template).render(values)
    except TemplateError as error:
        line = getattr(error, "lineno", None) or template_line(error, matrix.images)
        name = getattr(error, "name", None) or template
        raise MatrixError(f"images/templates/{name}, line {line}: {error}", "correct the template") from error


def quoted(value: str) -> str:
    """A label's value as a Dockerfile writes it, in which no variable is replaced."""
    return json.dumps(value, ensure_ascii=False).replace("$", "\\$")


def template_line(error: BaseException, images: Path) -> int:
    """The line of the template at which rendering failed: the last frame of the traceback inside `images/`."""
    line, traceback = 0, error.__traceback__
    while traceback:
        if traceback.tb_frame.f_code.co_filename.startswith(str(images)):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def image_manifest(
    matrix: Matrix, variant: Variant, provider: str, lock: Lock, added: LockedExtension | None = None
) -> dict[str, Any]:
    """The content of `/etc/slipway/image.json`: pins, lock, environment table, and exclusions with their reasons.

    `changes` of the base are the Debian packages that differ from the lock, because the mirror had moved on. `added` is
    what a user put on top, the pins of which then count, too.
    """
    pins = lock.extended_by(added.lock) if added else lock
    return {
        **({"extension": added.describe()} if added else {}),
        "schema": 1,
        "target": variant.target,
        "variant": variant.name,
        "status": variant.image_status,
        "version": project_version(matrix.root),
        "python": variant.base.python,
        "base": {
            "name": variant.base.name,
            "provider": provider,
            "image": variant.base.image,
            "digest": lock.base_digest if provider == "registry" else "",
            "glibc": variant.base.glibc,
            "changes": [asdict(change) for change in lock.changes],
        },
        "lock": f"sha256:{lock.digest}" if lock.text else "",
        "packages": list(variant.packages),
        "pins": pins.versions,
        "excluded": variant.exclude,
        "pruned": variant.prune,
        "architectures": list(variant.architectures),
        "driver": variant.driver,
        "env": [asdict(entry) for entry in matrix.env(variant.target, variant.debug)],
    }


def image_labels(matrix: Matrix, variant: Variant, manifest: dict[str, Any]) -> dict[str, str]:
    """OCI annotations (https://github.com/opencontainers/image-spec/blob/main/annotations.md) and `dev.slipway.*`.

    `CHANGES` is among them only for an image whose base is not the locked one, and what the lock says only with a lock.
    """
    names = {STANDS_FOR.get(name, name): version for name, version in manifest["pins"].items()}
    pins = {name: names[name] for name in ("torch", "ray", "transformers", "vllm") if name in names}
    changes = [str(PackageChange(**change)) for change in manifest["base"]["changes"]]
    changed = {CHANGES: "; ".join(changes)} if changes else {}
    locked = {
        "dev.slipway.lock": manifest["lock"],
        "dev.slipway.pins": json.dumps(pins, separators=(",", ":"), sort_keys=True),
    }
    added = {"dev.slipway.extension": manifest["extension"]["digest"]} if "extension" in manifest else {}
    return {
        **changed,
        **added,
        **(locked if manifest["lock"] else {}),
        "org.opencontainers.image.title": f"slipway {variant.identifier}",
        "org.opencontainers.image.description": "PPO trainer and a launcher that forms one Ray cluster anywhere",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.version": manifest["version"],
        "org.opencontainers.image.revision": source_revision(matrix.root),
        "org.opencontainers.image.created": datetime.fromtimestamp(source_date(matrix.root), UTC).isoformat(),
        "org.opencontainers.image.base.name": variant.base.image,
        "dev.slipway.target": variant.target,
        "dev.slipway.variant": variant.name,
        "dev.slipway.status": manifest["status"],
        "dev.slipway.base.provider": manifest["base"]["provider"],
    }
