"""Checks of GPUs and RDMA adapters: device files, driver, libraries."""

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from entrypoints.host.accelerators import driver_version
from entrypoints.host.network.fabric_settings import NCCL_HCAS, without_rdma
from entrypoints.host.network.rails import HCAS
from entrypoints.host.versions import release
from entrypoints.preflight.check import Finding, NodeFacts, Verdict, ok, skip

_EFA = (
    "Slipway's images have neither libfabric nor AWS's plug-in for NCCL: mount those of the host's EFA installer, with "
    "-v /opt/amazon:/opt/amazon:ro and their folders in LD_LIBRARY_PATH, or set SLIPWAY_HCAS=none for sockets"
)


def gpu_access(facts: NodeFacts) -> Finding:
    """Whether this process can open the GPUs' device files."""
    accelerator = facts.accelerator
    if accelerator is None:
        return skip("gpu", "no GPU is used")
    flags = f"run the container with {accelerator.run_flags}"
    for name in accelerator.shared_devices:
        if not facts.tree.exists(name):
            fix = f"{flags}, and check that the host has loaded the {accelerator.vendor} driver"
            return Finding("gpu", Verdict.FAIL, f"/{name} is missing", fix)
    shared = [facts.tree.path(name) for name in accelerator.shared_devices]
    devices = facts.tree.matching(accelerator.gpu_devices)
    if not devices:
        return Finding("gpu", Verdict.FAIL, f"no device file matches /{accelerator.gpu_devices}", flags)
    for device in (*shared, *devices):
        if not os.access(device, os.R_OK | os.W_OK):
            return _closed(facts, device, flags)
    return ok("gpu", f"{len(devices)} {accelerator.vendor} GPUs")


def _closed(facts: NodeFacts, device: Path, flags: str) -> Finding:
    """The finding for a device file that this user cannot open: a missing group if the group may open it."""
    status = device.stat()
    if not status.st_mode & stat.S_IWGRP:
        return Finding("gpu", Verdict.FAIL, f"{_name(facts, device)} cannot be opened", flags)
    gid = status.st_gid
    return Finding(
        "gpu", Verdict.FAIL, f"{_name(facts, device)} belongs to group {gid}, and this user is not in it",
        f"run the container with --group-add {gid}; use the number, as group names differ between host and image",
    )  # fmt: skip


def _name(facts: NodeFacts, path: Path) -> str:
    return f"/{path.relative_to(facts.tree.root)}"


def driver(facts: NodeFacts) -> Finding:
    """Whether the host's kernel driver is new enough for the image's user-space stack."""
    accelerator = facts.accelerator
    if accelerator is None:
        return skip("driver", "no driver is needed")
    vendor, component = accelerator.vendor, accelerator.component.upper()
    if not facts.tree.exists(accelerator.driver_path):
        return Finding(
            "driver", Verdict.FAIL, f"the {vendor} driver is not loaded on this host", accelerator.driver_fix
        )
    version = driver_version(facts.tree, accelerator)
    stack = facts.host.versions.get(accelerator.component)
    if not version or stack is None:
        return ok("driver", f"{vendor} {version or 'driver of unknown version'}, {component} {stack or 'unknown'}")
    major = release(stack)[:1]
    needed = next((least for bound, least in accelerator.minimum_drivers if major >= (bound,)), ())
    if release(version) >= needed:
        return ok("driver", f"{vendor} {version}, {component} {stack}")
    least = ".".join(map(str, needed))
    return Finding(
        "driver", Verdict.FAIL if accelerator.driver_required else Verdict.WARN,
        f"the {vendor} driver {version} is too old for the image's {component} {stack}, which needs {least} or newer",
        f"update the host's driver, or use a variant with an older {component}: buildkit targets",
    )  # fmt: skip


def rdma(facts: NodeFacts, load: Callable[[str], object] = ctypes.CDLL) -> Finding:
    """Whether NCCL can use the host's adapters. Otherwise it silently uses sockets, which are much slower."""
    choice = facts.host.fabric.choice
    if choice.unused and facts.uses_gpus and HCAS not in facts.variables and NCCL_HCAS not in facts.variables:
        return Finding("rdma", Verdict.WARN, without_rdma(choice), f"name the adapters to use in {HCAS}, or none")
    if not facts.rdma:
        return skip("rdma", "no RDMA adapter, or no GPU is used")
    kind = facts.host.fabric.kind
    fallback = f"the host has {len(facts.host.fabric.choice.hcas)} {kind} adapters, but NCCL would silently use sockets"
    devices = sorted(facts.tree.path("dev/infiniband").glob("uverbs*"))
    flag = "run the container with --device /dev/infiniband --cap-add IPC_LOCK"
    if not devices:
        return Finding("rdma", facts.severe, f"{fallback}: the container has no /dev/infiniband", flag)
    for device in devices:
        if not os.access(device, os.R_OK | os.W_OK):
            why = os.strerror(errno.EACCES).lower()
            return Finding("rdma", facts.severe, f"{fallback}: {_name(facts, device)}: {why}", flag)
    needed = {"libibverbs.so.1": "use an image with rdma-core, or SLIPWAY_HCAS=none for sockets"}
    if kind == "efa":
        needed |= dict.fromkeys(("libfabric.so.1", _network_plugin(facts.variables)), _EFA)
    for library, fix in needed.items():
        try:
            load(library)
        except OSError as error:
            return Finding("rdma", facts.severe, f"{fallback}: {error}", fix)
    return ok("rdma", f"{len(facts.host.fabric.choice.hcas)} {kind} adapters can be opened")


def _network_plugin(variables: Mapping[str, str]) -> str:
    """The library of NCCL's network plug-in: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"""
    name = variables.get("NCCL_NET_PLUGIN", "")
    if ".so" in name:
        return name
    return f"libnccl-net-{name}.so" if name else "libnccl-net.so"
