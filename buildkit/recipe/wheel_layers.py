"""Splits the wheels of a lock into the layers of the image."""

import hashlib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from packaging.utils import canonicalize_name

from buildkit.errors import MatrixError
from buildkit.recipe.lock import Pin
from buildkit.recipe.matrix import WheelLayer


def layer_requirements(pins: Iterable[Pin], layers: Iterable[WheelLayer]) -> dict[str, str]:
    """The requirements file of each layer."""
    return {name: "".join(pin.text for pin in layer_pins) for name, layer_pins in split_by_layer(pins, layers).items()}


def download_caches(pins: Iterable[Pin], layers: Iterable[WheelLayer]) -> dict[str, str]:
    """The name of each layer's cache of downloads. Two layers share it only if they have the same wheels.

    A wheel's code may run while later wheels are installed: what it writes reaches no other image.
    """
    return {
        name: f"slipway-uv-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        for name, text in layer_requirements(pins, layers).items()
    }


def split_by_layer(pins: Iterable[Pin], layers: Iterable[WheelLayer]) -> dict[str, list[Pin]]:
    """The pins of each layer; a distribution goes into the first layer with a matching pattern."""
    split: dict[str, list[Pin]] = {layer.name: [] for layer in layers}
    for pin in pins:
        split[layer_of(pin.name, layers)].append(pin)
    return split


def layer_of(distribution: str, layers: Iterable[WheelLayer]) -> str:
    for layer in layers:
        if any(fnmatchcase(canonicalize_name(distribution), pattern) for pattern in layer.distributions):
            return layer.name
    raise MatrixError(
        f"images/matrix.toml: no wheel layer matches {distribution}", 'let the last of [[wheel_layers]] match ["*"]'
    )
