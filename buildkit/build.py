"""Builds an image: everything that goes in is staged into one context folder, then the engine turns it into layers."""

import json
import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

from buildkit.base import bootstrap, choose_provider
from buildkit.engine import BuildRequest, Engine
from buildkit.errors import DiskError
from buildkit.host import HostSettings, as_shell, read_host
from buildkit.lock import lock_digest, read_lock
from buildkit.matrix import Base, Matrix, Variant
from buildkit.render import image_labels, image_manifest, render_dockerfile, source_date
from buildkit.wheels import local_wheels

log = logging.getLogger(__name__)

CODE = ("entrypoints", "trainer")
CA_IN_BUILD = "/run/slipway/ca.pem"
LAUNCH = """#!/opt/slipway/venv/bin/python
import sys

from entrypoints.cli import main

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


def image_tags(variant: Variant, lock: str) -> tuple[str, ...]:
    """Moving tag of the target, tag of the variant, and the immutable one with the lock's digest."""
    name = f"slipway:{variant.identifier}"
    return (f"slipway:{variant.target}", name, f"{name}-{lock_digest(lock)[:12]}")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipway"


def build_image(
    matrix: Matrix,
    variant: Variant,
    engine: Engine,
    base: str = "auto",
    tags: tuple[str, ...] = (),
    no_cache: bool = False,
    progress: str = "auto",
) -> BuildResult:
    """Builds and tags the image. `tags` come on top of the variant's own.

    Raises a `BuildkitError` for a stale lock, too little disk, a base that cannot be had, or a failing step.
    """
    start = time.monotonic()
    lock = read_lock(matrix, variant)
    check_disk(matrix, variant, engine)
    host = read_host()
    provider, reason = choose_provider(variant.base, base, engine)
    log.info("base: %s (%s)", provider, reason)
    names = (*image_tags(variant, lock), *tags)
    context = cache_folder() / "contexts" / variant.identifier
    with tempfile.TemporaryDirectory(prefix="slipway-secrets-") as folder:
        stage(context, matrix, variant, lock, provider, host)
        secrets = write_secrets(Path(folder), variant.base, host)
        arguments = {"SOURCE_DATE_EPOCH": str(source_date(matrix.root)), **host.proxies}
        engine.build(BuildRequest(context, names, secrets, arguments, no_cache, progress))
    image = engine.client.images.get(names[0])
    return BuildResult(
        variant.target, variant.name, names, str(image.id), image.attrs["Size"], time.monotonic() - start, provider
    )


def check_disk(matrix: Matrix, variant: Variant, engine: Engine) -> None:
    free, needed = engine.free_bytes(), matrix.targets[variant.target].disk_gib
    if free is not None and free < needed * 2**30:
        raise DiskError(
            f"{free / 2**30:.1f} GiB free where the engine keeps images; {variant.identifier} needs {needed} GiB",
            "free some space: `docker system df` shows what takes it, `docker system prune` removes what nothing uses",
        )


def stage(context: Path, matrix: Matrix, variant: Variant, lock: str, provider: str, host: HostSettings) -> None:
    """Lays out the build context: exactly what goes into the image or is mounted while it is made."""
    shutil.rmtree(context, ignore_errors=True)
    (context / "tools").mkdir(parents=True)
    (context / "wheels").mkdir()
    manifest = image_manifest(matrix, variant, provider, lock)
    labels = image_labels(matrix, variant, manifest)
    (context / "Dockerfile").write_text(render_dockerfile(matrix, variant, provider, labels))
    (context / "requirements.txt").write_text(lock)
    (context / "image.json").write_text(json.dumps(manifest, indent=2) + "\n")
    (context / "launch").write_text(LAUNCH)
    (context / "launch").chmod(0o755)
    link(Path(find_uv_bin()), context / "tools" / "uv")
    for wheel in local_wheels(lock, host):
        link(wheel, context / "wheels" / wheel.name)
    for package in CODE:
        shutil.copytree(matrix.root / package, context / "app" / package, ignore=shutil.ignore_patterns("__pycache__"))
    if provider == "bootstrap":
        link(bootstrap(variant, cache_folder(), source_date(matrix.root)), context / "rootfs.tar")


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
    """The host's settings as files that the build may read. An absent one is empty, so that a mount never fails."""
    contents = {
        "host_environment": as_shell(host.build_environment(CA_IN_BUILD)),
        "ca_bundle": host.ca_bundle.read_text() if host.ca_bundle else "",
        "apt_sources": host.apt_sources if serves(host, base) else "",
    }
    paths = {name: folder / name for name in contents}
    for name, path in paths.items():
        path.write_text(contents[name])
    return paths
