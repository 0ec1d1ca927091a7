"""GPUs and RDMA adapters: can this process open them, and are driver and libraries fit for the image?"""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

from entrypoints.host.versions import release
from entrypoints.preflight.check import Finding, NodeFacts, Verdict, ok, skip

_MINIMUM_DRIVER = ((13, (580,)), (12, (525,)), (11, (450,)))
"""NVIDIA's driver for each CUDA major version:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""
_OLD_AMDGPU = (6, 10)
"""Kernel drivers before it (ROCm 6.3) are outside the range that ROCm 7's user space supports:
https://rocm.docs.amd.com/projects/install-on-linux/en/latest/reference/user-kernel-space-compat-matrix.html"""


def gpu_access(facts: NodeFacts) -> Finding:
    if facts.target == "rocm":
        return _amd(facts)
    if facts.target == "cuda":
        return _nvidia(facts)
    return skip("gpu", "this image uses none")


def _amd(facts: NodeFacts) -> Finding:
    flags = "--device /dev/kfd --device /dev/dri"
    kfd = facts.tree.path("dev/kfd")
    if not kfd.exists():
        return Finding(
            "gpu", Verdict.FAIL, "/dev/kfd is not there", f"run the container with {flags}; is amdgpu loaded?"
        )
    renders = sorted(facts.tree.path("dev/dri").glob("renderD*"))
    if not renders:
        return Finding("gpu", Verdict.FAIL, "/dev/dri has no render node", f"run the container with {flags}")
    for device in (kfd, *renders):
        if not os.access(device, os.R_OK | os.W_OK):
            gid = device.stat().st_gid
            return Finding(
                "gpu", Verdict.FAIL, f"{_name(facts, device)} belongs to group {gid}, which this user is not in",
                f"run the container with --group-add {gid}, the host's number: names differ between host and image",
            )  # fmt: skip
    return ok("gpu", f"{len(renders)} render nodes")


def _nvidia(facts: NodeFacts) -> Finding:
    devices = [path for path in facts.tree.path("dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    if not devices:
        return Finding(
            "gpu", Verdict.FAIL, "no /dev/nvidia0", "run the container with --gpus all (NVIDIA Container Toolkit)"
        )
    for device in sorted(devices):
        if not os.access(device, os.R_OK | os.W_OK):
            return Finding(
                "gpu", Verdict.FAIL, f"{_name(facts, device)} cannot be opened", "run the container with --gpus all"
            )
    return ok("gpu", f"{len(devices)} GPUs")


def _name(facts: NodeFacts, path: Path) -> str:
    return f"/{path.relative_to(facts.tree.root)}"


def driver(facts: NodeFacts) -> Finding:
    """The host's kernel driver against the image's CUDA or ROCm."""
    if facts.target == "cuda":
        return _nvidia_driver(facts)
    if facts.target == "rocm":
        return _amd_driver(facts)
    return skip("driver", "this image needs none")


def _nvidia_driver(facts: NodeFacts) -> Finding:
    text = facts.tree.text("proc/driver/nvidia/version")
    cuda = facts.host.versions.get("cuda")
    if text is None:
        return Finding(
            "driver", Verdict.FAIL, "no NVIDIA driver is loaded on this host", "install it, or use the cpu image"
        )
    version = next((word for word in text.split() if word[:1].isdigit() and word.count(".") >= 1), "")
    needed = next((least for major, least in _MINIMUM_DRIVER if cuda and release(cuda)[:1] == (major,)), None)
    if needed is None or not version:
        return ok("driver", f"NVIDIA {version or 'of unknown version'}")
    if release(version) < needed:
        return Finding(
            "driver", Verdict.FAIL, f"NVIDIA {version} is too old for the image's CUDA {cuda}, which needs {needed[0]}",
            "update the host's driver, or use a variant with an older CUDA: buildkit targets",
        )  # fmt: skip
    return ok("driver", f"NVIDIA {version}, CUDA {cuda}")


def _amd_driver(facts: NodeFacts) -> Finding:
    version, rocm = facts.tree.text("sys/module/amdgpu/version"), facts.host.versions.get("rocm", "unknown")
    if not facts.tree.exists("sys/class/kfd"):
        return Finding(
            "driver", Verdict.FAIL, "no AMD driver is loaded on this host", "load amdgpu, or use the cpu image"
        )
    if version is None:
        return ok("driver", f"amdgpu of the kernel itself, ROCm {rocm}")
    if release(rocm) >= (7,) and release(version) < _OLD_AMDGPU:
        return Finding(
            "driver", Verdict.WARN, f"amdgpu {version} is older than ROCm {rocm} supports", "update amdgpu-dkms"
        )
    return ok("driver", f"amdgpu {version}, ROCm {rocm}")


def rdma(facts: NodeFacts, load: Callable[[str], object] = ctypes.CDLL) -> Finding:
    """Whether NCCL can use the adapters that the host has. If not, it takes sockets without a word: much slower."""
    if not facts.rdma:
        return skip("rdma", "no RDMA adapter here, or an image without GPUs")
    kind = facts.host.fabric.kind
    fallback = f"the host has {len(facts.host.fabric.choice.hcas)} {kind} adapters, but NCCL would silently use sockets"
    devices = sorted(facts.tree.path("dev/infiniband").glob("uverbs*"))
    flag = "run the container with --device /dev/infiniband --cap-add IPC_LOCK"
    if not devices:
        return Finding("rdma", facts.severe, f"{fallback}: /dev/infiniband is not in this container", flag)
    for device in devices:
        if not os.access(device, os.R_OK | os.W_OK):
            why = os.strerror(errno.EACCES).lower()
            return Finding("rdma", facts.severe, f"{fallback}: {_name(facts, device)}: {why}", flag)
    for library in ("libibverbs.so.1", *(("libfabric.so.1",) if kind == "efa" else ())):
        try:
            load(library)
        except OSError as error:
            return Finding(
                "rdma", facts.severe, f"{fallback}: {error}", "use an image with rdma-core, or SLIPWAY_HCAS=none"
            )
    return ok("rdma", f"{len(facts.host.fabric.choice.hcas)} {kind} adapters can be opened")
