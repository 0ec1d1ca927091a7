"""Supplies the base image: from a registry, or made from Debian packages by mmdebstrap where none answers."""

import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from buildkit.engine import Engine
from buildkit.errors import BaseError
from buildkit.matrix import Base, Variant

log = logging.getLogger(__name__)

# What Debian's own slim images leave out as well (https://github.com/debuerreotype/debuerreotype).
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*")
KEPT = ("/usr/share/doc/*/copyright",)

# Run in the new root at the end: what belongs to this host or differs from one run to the next.
CLEAN = """
rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/* "$1"/etc/apt/apt.conf.d/99mmdebstrap
rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1"/var/cache/ldconfig/aux-cache "$1"/var/cache/debconf/*-old
find "$1"/var/log -type f -delete
rm -f "$1"/etc/machine-id "$1"/etc/hostname "$1"/etc/resolv.conf
"""


def choose_provider(base: Base, requested: str, engine: Engine) -> tuple[str, str]:
    """The provider and the reason for it. `auto` takes the first that can be had; `BaseError` when none can."""
    if requested != "auto":
        if requested not in base.providers:
            raise BaseError(
                f"base {base.name} has no provider `{requested}`", f"one of: auto, {', '.join(base.providers)}"
            )
        return requested, "asked for"
    refusals: list[str] = []
    for provider in base.providers:
        refusal = AVAILABLE[provider](base, engine)
        if not refusal:
            return provider, "; ".join([*refusals, f"{provider} can be had"])
        refusals.append(f"{provider}: {refusal}")
    raise BaseError(
        f"no provider can supply base {base.name}: {'; '.join(refusals)}",
        "make a registry reachable, or install mmdebstrap (`apt-get install mmdebstrap`)",
    )


def registry_refusal(base: Base, engine: Engine) -> str:
    return "" if engine.can_pull(base.image) else f"{base.image} is not here and no registry answers"


def bootstrap_refusal(_base: Base, _engine: Engine) -> str:
    return "" if shutil.which("mmdebstrap") else "mmdebstrap is not installed"


AVAILABLE: dict[str, Callable[[Base, Engine], str]] = {"registry": registry_refusal, "bootstrap": bootstrap_refusal}


def bootstrap(variant: Variant, cache: Path, source_date: int) -> Path:
    """A tar of the root file system with the variant's packages, made once per package set and kept in `cache`.

    Raises `BaseError` when mmdebstrap fails; a failed one leaves nothing behind.
    """
    settings = variant.base.bootstrap
    if settings is None:
        raise BaseError(f"base {variant.base.name} cannot be bootstrapped", "use --base registry")
    command = ["mmdebstrap", "--quiet", f"--variant={settings['variant']}", '--aptopt=APT::Install-Recommends "false"']
    command += [f"--dpkgopt=path-exclude={path}" for path in LEFT_OUT] + [
        f"--dpkgopt=path-include={path}" for path in KEPT
    ]
    command += [f"--include={','.join(variant.packages)}", f"--customize-hook={CLEAN}", settings["suite"]]
    key = hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]
    tar = cache / "bases" / f"{variant.base.name}-{key}.tar"
    if tar.is_file():
        log.info("base: %s, made before", tar.name)
        return tar
    log.info("base: making %s from %d Debian packages and what they need", variant.base.name, len(variant.packages))
    tar.parent.mkdir(parents=True, exist_ok=True)
    partial = tar.with_suffix(".partial.tar")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(source_date)}
    try:
        done = subprocess.run([*command, str(partial)], env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = "\n".join(f"  {line}" for line in done.stderr.strip().splitlines()[-8:])
            raise BaseError(
                f"mmdebstrap could not make {variant.base.name}:\n{reason}", "check apt's sources (`apt-get update`)"
            )
        partial.replace(tar)
    finally:
        partial.unlink(missing_ok=True)
    return tar
