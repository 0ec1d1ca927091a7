"""Fills a build context: exactly what goes into the image or is mounted while it is built."""

import json
import shutil
from pathlib import Path

from uv import find_uv_bin

from buildkit.host.files import link
from buildkit.host.settings import HostSettings
from buildkit.images.parent import OWN_STAGE, Parent
from buildkit.images.plan import CHIPS, CODE, require_code
from buildkit.recipe.dockerfile import image_labels, image_manifest, render_dockerfile, render_extension
from buildkit.recipe.extension import LEFT_OUT, LockedExtension
from buildkit.recipe.lock import STANDS_FOR, Lock
from buildkit.recipe.matrix import Matrix, Variant
from buildkit.recipe.wheel_layers import split_by_layer
from buildkit.supply.base import preferences
from buildkit.supply.wheels import local_wheels

LAUNCH = """#!/opt/slipway/venv/bin/python
import sys

from entrypoints.__main__ import main

sys.exit(main())
"""
USER = "import os, entrypoints.host.user; entrypoints.host.user.complete(os.environ)\n"  # run when Python starts


def stage(
    context: Path,
    matrix: Matrix,
    variant: Variant,
    lock: Lock,
    provider: str,
    host: HostSettings,
    warm: Path | None = None,
    rootfs: Path | None = None,
) -> str:
    """Fills the build context with exactly what goes into the image or is mounted during the build.

    Returns the Dockerfile. Raises `MatrixError` for a project without a part of the code.
    """
    require_code(matrix.root)
    stage_installer(context, matrix, variant)
    manifest = image_manifest(matrix, variant, provider, lock)
    labels = image_labels(matrix, variant, manifest)
    stage_wheels(context, matrix, lock, host)
    (context / "image.json").write_text(json.dumps(manifest, indent=2) + "\n")
    (context / "constraints.txt").write_text(lock.constraints)
    (context / "launch").write_text(LAUNCH)
    (context / "launch").chmod(0o755)
    (context / "slipway_user.pth").write_text(USER)
    for package in CODE:
        shutil.copytree(matrix.root / package, context / "app" / package, ignore=shutil.ignore_patterns("__pycache__"))
    (context / "app" / "images").mkdir()
    shutil.copy2(matrix.root / CHIPS, context / "app" / CHIPS)
    stage_aliases(matrix.images / "aliases", context)
    stage_names(context / "app", variant, lock)
    for folder in ("app", "workspace"):
        fix_modes(context / folder)
    if warm:
        shutil.copytree(warm, context / "warm", copy_function=lambda source, target: link(Path(source), Path(target)))
    if rootfs:
        link(rootfs, context / "rootfs.tar")
    if provider == "registry":
        (context / "preferences").write_text(preferences(variant, lock.debs))
    return render_dockerfile(matrix, variant, provider, labels, lock, bool(warm))


def stage_installer(context: Path, matrix: Matrix, variant: Variant) -> None:
    """Stages the installer of wheels, and its lists of files to omit or not to compile."""
    (context / "tools").mkdir(parents=True, exist_ok=True)
    link(Path(find_uv_bin()), context / "tools" / "uv")
    shutil.copy2(matrix.images / "templates" / "install-wheels", context / "install-wheels")
    for name, patterns in (("prune", variant.prune), ("source-only", variant.source_only)):
        (context / f"{name}.txt").write_text("".join(f"{path}\n" for path in patterns))


def stage_extension(
    context: Path,
    matrix: Matrix,
    variant: Variant,
    lock: Lock,
    added: LockedExtension,
    parent: Parent,
    host: HostSettings,
) -> str:
    """Adds a user's extension to the build context. Returns the end of the Dockerfile."""
    if not (context / "tools").is_dir():
        stage_installer(context, matrix, variant)
    folder = context / "extension"
    for name in ("packages", "folders", "wheels"):
        (folder / name).mkdir(parents=True)
    manifest = image_manifest(matrix, variant, parent.provider, lock, added)
    labels = image_labels(matrix, variant, manifest)
    if parent.reference != OWN_STAGE:  # its code is that of its own commit
        labels = {name: value for name, value in labels.items() if not name.endswith((".revision", ".created"))}
    (folder / "image.json").write_text(json.dumps(manifest, indent=2) + "\n")
    (folder / "constraints.txt").write_text(lock.extended_by(added.lock).constraints)
    (folder / "extension.txt").write_text(added.lock.text)
    (folder / "requirements.txt").write_text(added.lock.requirements)
    for wheel in local_wheels(added.lock.pins, host):
        link(wheel, folder / "wheels" / wheel.name)
    for deb in added.debs:
        link(deb, folder / "packages" / deb.name)
    for source in added.extension.folders:
        ignored = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(source, folder / "folders" / source.name, symlinks=True, ignore=ignored)
    fix_modes(folder / "folders")
    (folder / "slipway-extension.pth").write_text("".join(f"{path}\n" for path in added.extension.project_paths))
    return render_extension(matrix, variant, parent.reference, labels, added)


def fix_modes(folder: Path) -> None:
    """Everybody may read; only the owner writes. A checkout has the modes of its owner's umask."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def stage_aliases(aliases: Path, context: Path) -> None:
    """verl's names: modules of verl and verl-recipe beside the code, and what launch lines read in the workspace."""
    ignored = shutil.ignore_patterns("__pycache__")
    for package in ("verl", "recipe"):
        shutil.copytree(aliases / package, context / "app" / package, ignore=ignored)
    shutil.copytree(aliases / "examples", context / "workspace" / "examples", ignore=ignored)
    environment = context / "workspace" / "verl" / "trainer" / "runtime_env.yaml"
    environment.parent.mkdir(parents=True)
    shutil.copy2(aliases / "verl" / "trainer" / "runtime_env.yaml", environment)


def stage_names(app: Path, variant: Variant, lock: Lock) -> None:
    """Metadata by which programs find a distribution under the name that it stands for: `vllm` asks for `vllm`."""
    for name, stands_for in STANDS_FOR.items():
        if version := lock.versions.get(name):
            local = f"{version.partition('+')[0]}+{variant.target}"
            folder = app / f"{stands_for}-{local}.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {stands_for}\nVersion: {local}\n")


def stage_wheels(context: Path, matrix: Matrix, lock: Lock, host: HostSettings) -> None:
    """A requirements file for each layer, and those of its wheels that lie on this host."""
    (context / "requirements").mkdir()
    for name, pins in split_by_layer(lock.pins, matrix.wheel_layers).items():
        (context / "requirements" / f"{name}.txt").write_text("".join(pin.text for pin in pins))
        folder = context / "wheels" / name
        folder.mkdir(parents=True)
        for wheel in local_wheels(pins, host):
            link(wheel, folder / wheel.name)
