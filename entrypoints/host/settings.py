"""This host as a whole, and the environment variables that follow from its network and from the image's table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrypoints.errors import UsageError
from entrypoints.host.accelerators import ACCELERATORS, architectures, foreign_settings, may_use_gpus, visible_devices
from entrypoints.host.network.fabric import Fabric, detect_fabric
from entrypoints.host.network.fabric_settings import NCCL_HCAS, NO_RDMA, Setting, fabric_settings, interface_settings
from entrypoints.host.tree import Tree
from entrypoints.host.versions import component_versions, image_identity, installed, satisfies, slipway_version

IMAGE_MANIFEST = "etc/slipway/image.json"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host and the image that runs on it."""

    fabric: Fabric
    architectures: tuple[str, ...]
    """Of the GPUs: `gfx942`, `sm_90`."""
    versions: Mapping[str, str]
    """Versions of rocm, cuda, nccl, vllm and ray, without those that are unknown."""
    target: str | None
    """The image's: `cpu`, `cuda` or `rocm`; None outside an image."""
    slipway: str | None
    """Slipway's version; None where neither a manifest nor a distribution tells it."""
    image: str | None
    """Which image build this is (`image_identity`); None outside an image."""
    lock: str | None
    """The digest of the image's lock; None outside an image."""
    settings: tuple[Setting, ...]
    """Settings for this host and image, except for the socket interface, which depends on the peers."""
    warnings: tuple[str, ...]

    def interface_settings(self, interface: str | None = None, reason: str = "") -> list[Setting]:
        """Settings for the given interface, or for the one that the host is likely to use."""
        if interface is not None:
            return interface_settings(interface, reason)
        return interface_settings(self.fabric.interface, self.fabric.interface_reason)


def examine_host(tree: Tree, variables: Mapping[str, str]) -> Host:
    """The host in the tree: its devices, driver files and image manifest. Raises UsageError.

    A recorded tree with a manifest is examined for that image, any other for the image of this process.
    """
    fabric = detect_fabric(tree, variables)
    document = read_manifest(tree)
    versions = _versions(tree, document.get("pins", {}))
    from_fabric, warnings = fabric_settings(fabric.choice, versions.get("nccl"))
    if NCCL_HCAS in variables:  # the user has chosen adapters in NCCL's own words
        from_fabric = [setting for setting in from_fabric if setting.name != NO_RDMA]
    gpu_architectures = architectures(fabric.gpus)
    foreign = foreign_settings(gpu_architectures)
    from_fabric = [setting for setting in from_fabric if not setting.name.startswith(foreign)]
    from_fabric += visibility_settings(variables)
    from_table = table_settings(document.get("env", []), gpu_architectures, versions, fabric.kind)
    settings = {setting.name: setting for setting in reversed([*from_fabric, *from_table])}  # the first of a name wins
    return Host(
        fabric=fabric,
        architectures=gpu_architectures,
        versions=versions,
        target=document.get("target"),
        slipway=slipway_version(document),
        image=image_identity(document),
        lock=document.get("lock"),
        settings=tuple(reversed(settings.values())),
        warnings=tuple(warnings) if may_use_gpus(document.get("target")) else (),
    )


def visibility_settings(variables: Mapping[str, str]) -> list[Setting]:
    """The variable that Ray reads, where a scheduler restricts this process by another one of the same GPUs."""
    settings = []
    for row in ACCELERATORS:
        first, *others = row.visible_variables
        given = [name for name in others if name in variables]
        if given and first not in variables:
            count = len(visible_devices(variables[given[0]]))
            reason = f"{given[0]}={variables[given[0]]!r} leaves {count} GPUs, which Ray counts by this name only"
            settings.append(Setting(first, ",".join(map(str, range(count))), reason))
    return settings


def read_manifest(tree: Tree) -> dict[str, Any]:
    """The manifest in the tree, else that of the image this process runs in; empty outside an image.

    Raises UsageError if it is damaged.
    """
    recorded = tree.path(IMAGE_MANIFEST)
    manifest = recorded if recorded.exists() else Path("/", IMAGE_MANIFEST)
    try:
        document = json.loads(manifest.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{manifest} cannot be read: {error}", "the image is damaged: rebuild it") from error
    if not isinstance(document, dict):
        raise UsageError(f"{manifest} is not an image manifest", "the image is damaged: rebuild it")
    return document


def table_settings(
    entries: Sequence[Mapping[str, Any]], architectures: Sequence[str], versions: Mapping[str, str], fabric: str
) -> list[Setting]:
    """The entries of the image's table whose conditions all hold here, in order."""
    return [
        Setting(entry["name"], entry["value"], entry["reason"])
        for entry in entries
        if all(holds(key, value, architectures, versions, fabric) for key, value in entry["when"].items())
    ]


def holds(key: str, value: Any, architectures: Sequence[str], versions: Mapping[str, str], fabric: str) -> bool:
    """Whether one condition holds. A condition on an unknown fact or an unknown key never holds."""
    match key:
        case "arch":
            return any(architecture.startswith(tuple(value)) for architecture in architectures)
        case "fabric":
            return fabric in value
        case _:
            return key in versions and satisfies(versions[key], value)


def _versions(tree: Tree, pins: Mapping[str, str]) -> dict[str, str]:
    versions = component_versions(pins)
    for row in ACCELERATORS:
        if row.version_file is not None and (version := tree.text(row.version_file)) is not None:
            versions[row.component] = version
    if "ray" not in versions and (ray := installed("ray")) is not None:
        versions["ray"] = ray
    return versions
