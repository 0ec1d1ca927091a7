"""Compiled code that came with the image or with `buildkit run --warm`: the first start copies it instead of compiling.

`buildkit warm` made it; `warm.json` says what it fits. The compilers write beside it, so each job gets a copy.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from entrypoints.errors import LaunchError
from entrypoints.host.accelerators import accelerator_of, driver_version
from entrypoints.host.child_environment import CACHES, cache_directory
from entrypoints.host.settings import Host
from entrypoints.host.tree import Tree

PLACE = "opt/slipway/warm"
COMPILED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
"""The variables of the caches in it."""

log = logging.getLogger(__name__)


def use_starting_cache(tree: Tree, host: Host, environment: Mapping[str, str]) -> dict[str, str]:
    """Copy the compiled code into this job's caches, and return the variables that name them; none if it does not fit.

    Logs which one happened, and why.
    """
    if not tree.exists(f"{PLACE}/warm.json"):
        return {}
    source = tree.path(PLACE)
    if reason := _misfit(source, tree, host):
        log.warning("compiled code in %s is not used: %s", source, reason)
        return {}
    try:
        root = cache_directory(environment)
        folders = {name: environment.get(name) or str(root / CACHES[name]) for name in COMPILED}
        copied = sum(copy_compiled(source / CACHES[name], Path(folder)) for name, folder in folders.items())
    except (OSError, LaunchError) as error:
        log.warning("compiled code in %s is not used: %s", source, error)
        return {}
    log.info("compiled code from %s: %d new files in %s", source, copied, ", ".join(folders.values()))
    return folders


def _misfit(source: Path, tree: Tree, host: Host) -> str | None:
    """Why the compiled code does not fit this image and node; None if it does."""
    try:
        key = json.loads((source / "warm.json").read_text(encoding="utf-8"))["key"]
        lock, devices, driver = key["lock"], set(key["devices"]), key["driver"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its warm.json cannot be read ({error!r})"
    accelerator = accelerator_of(host.target)
    here = {gpu.model for gpu in accelerator.find(tree)} if accelerator else set()
    version = driver_version(tree, accelerator) if accelerator else ""
    if lock != host.lock:
        return f"it was made with lock {lock}, and this image has {host.lock}"
    if not here <= devices:
        return f"it was made on {_listed(devices)}, and this node has {_listed(here)}"
    if driver != version:
        return f"it was made with driver {driver or 'none'}, and this node has {version or 'none'}"
    return None


def _listed(devices: set[str]) -> str:
    return " and ".join(sorted(devices)) or "CPU"


def copy_compiled(source: Path, target: Path) -> int:
    """Copy the files that the target lacks, and return their number. Other jobs may do the same at once."""
    lacking = [file for file in sorted(source.rglob("*")) if file.is_file()]
    lacking = [file for file in lacking if not (target / file.relative_to(source)).exists()]
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".starting-", dir=target) as folder:
        for file in lacking:
            place, part = target / file.relative_to(source), Path(folder, file.name)
            shutil.copyfile(file, part)
            if file.name.startswith("__grp__"):
                _relocate(part, place.parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            part.replace(place)
    return len(lacking)


def _relocate(group: Path, folder: Path) -> None:
    """Name the files of a kernel in this folder: Triton notes them with absolute paths, and ignores lost ones."""
    try:
        document = json.loads(group.read_bytes())
        paths = {name: str(folder / Path(path).name) for name, path in document["child_paths"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return  # another version's format: Triton compiles that kernel again
    group.write_text(json.dumps({**document, "child_paths": paths}))
