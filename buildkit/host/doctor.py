"""Looks whether this host can build and run the images: each check says ok, warn or fail, what it found, and the fix.

The checks are pure functions of what was found; finding it never fails, it only finds less. `warn` is for what some
targets or runtimes need, `fail` for what nothing works without, or what is here and broken.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from buildkit.host.machine import Machine, read_text
from buildkit.recipe.matrix import Matrix
from buildkit.running.flags import shm_size

OK, WARN, FAIL = "ok", "warn", "fail"
PROBE_TIMEOUT = 3  # seconds for an engine to answer
ENGINES = ("docker", "podman")


@dataclass(frozen=True)
class Check:
    check: str
    status: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class EngineFacts:
    """What one engine on PATH said; `problem` is empty when it answered."""

    name: str
    version: str = ""
    storage: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Findings:
    """All that the checks look at. `matrix` is None outside a checkout."""

    machine: Machine
    matrix: Matrix | None
    engines: tuple[EngineFacts, ...]
    buildx: str
    free_bytes: int
    mmdebstrap: bool
    numa_balancing: bool


def find(machine: Machine, matrix: Matrix | None, root: Path = Path("/")) -> Findings:
    engines = tuple(facts for name in ENGINES if (facts := probe_engine(name)))
    docker = next((engine for engine in engines if engine.name == "docker" and not engine.problem), None)
    storage = Path(next((engine.storage for engine in engines if engine.storage), "/var/lib"))
    return Findings(
        machine=machine,
        matrix=matrix,
        engines=engines,
        buildx=answer("docker", "buildx", "version") if docker else "",
        free_bytes=free_bytes(storage),
        mmdebstrap=shutil.which("mmdebstrap") is not None,
        numa_balancing=read_text(root / "proc/sys/kernel/numa_balancing") not in ("", "0"),
    )


def probe_engine(name: str) -> EngineFacts | None:
    """None when it is not installed."""
    if shutil.which(name) is None:
        return None
    info = answer(name, "info", "--format", "{{json .}}")
    try:
        document: dict[str, Any] = json.loads(info)
    except ValueError:
        return EngineFacts(name, problem="it is installed and does not answer")
    if name == "podman":
        version, storage = document.get("version", {}).get("Version"), document.get("store", {}).get("graphRoot")
    else:
        version, storage = document.get("ServerVersion"), document.get("DockerRootDir")
        if not version:
            problem = "; ".join(document.get("ServerErrors") or []) or "its daemon does not answer"
            return EngineFacts(name, problem=problem)
    return EngineFacts(name, str(version or ""), str(storage or ""))


def answer(*command: str) -> str:
    """What a command says on stdout; empty when it cannot be started, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def free_bytes(path: Path) -> int:
    """Free space where `path` is or would be."""
    existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return 0


def examine(findings: Findings) -> list[Check]:
    return [check(findings) for check in CHECKS]


def check_engine(findings: Findings) -> Check:
    working = [engine for engine in findings.engines if not engine.problem]
    if working:
        return Check("engine", OK, ", ".join(f"{engine.name} {engine.version}" for engine in working))
    if findings.engines:
        found = "; ".join(f"{engine.name}: {engine.problem}" for engine in findings.engines)
        return Check("engine", FAIL, found, "start it (`systemctl start docker`), and be in the group docker")
    return Check("engine", FAIL, "none", "install Docker or Podman; on Debian as root `ci/engine COMMAND` does it")


def check_buildx(findings: Findings) -> Check:
    if findings.buildx:
        return Check("buildx", OK, findings.buildx)
    if not any(engine.name == "docker" and not engine.problem for engine in findings.engines):
        return Check("buildx", OK, "not needed: no docker answers")
    return Check("buildx", WARN, "none", "install docker-buildx; without it images are not the same bytes twice")


def check_disk(findings: Findings) -> Check:
    free = findings.free_bytes / 2**30
    if findings.matrix is None:
        return Check("disk", WARN, f"{free:.0f} GiB free", "run from a checkout to compare it with the targets")
    needs = {name: target.disk_gib for name, target in findings.matrix.targets.items()}
    missing = [f"{name} {gib} GiB" for name, gib in needs.items() if gib > free]
    if not missing:
        return Check("disk", OK, f"{free:.0f} GiB free, enough for every target")
    status = FAIL if len(missing) == len(needs) else WARN
    fix = f"free some for {', '.join(missing)}: `docker system df` shows what takes it"
    return Check("disk", status, f"{free:.0f} GiB free", fix)


def check_driver(findings: Findings) -> Check:
    """The NVIDIA driver against the least of each cuda variant; AMD's user space fits drivers of a year around it."""
    machine = findings.machine
    if machine.nvidia_driver is None:
        if machine.amd_architectures:
            found = f"amdgpu {machine.amd_driver or 'of the kernel'}, {len(machine.amd_architectures)} GPUs"
            return Check("gpu driver", OK, f"{found} ({', '.join(sorted(set(machine.amd_architectures)))})")
        return Check("gpu driver", WARN, "no GPU", "enough to build, and to run target cpu; cuda and rocm need one")
    found = f"NVIDIA {machine.nvidia_driver}, {machine.nvidia_gpus} GPUs"
    cuda = findings.matrix.targets.get("cuda") if findings.matrix else None
    variants = cuda.variants.values() if cuda else []
    too_new = [variant for variant in variants if older(machine.nvidia_driver, variant.driver)]
    if not too_new:
        return Check("gpu driver", OK, found)
    least = ", ".join(f"{variant.name} needs {variant.driver}" for variant in too_new)
    status = FAIL if len(too_new) == len(variants) else WARN
    return Check("gpu driver", status, found, f"update the driver: {least}")


def older(driver: str, minimum: str) -> bool:
    try:
        return bool(minimum) and Version(driver) < Version(minimum)
    except InvalidVersion:
        return False


def check_toolkit(findings: Findings) -> Check:
    machine = findings.machine
    if not machine.nvidia_gpus:
        return Check("container toolkit", OK, "not needed: no NVIDIA GPU")
    found = [name for name, here in (("runtime", machine.container_toolkit), ("CDI", machine.cdi)) if here]
    if not found:
        return Check("container toolkit", FAIL, "none", "install nvidia-container-toolkit, restart the engine")
    if any(engine.name == "podman" for engine in findings.engines) and not machine.cdi:
        fix = "podman takes GPUs by CDI: `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
        return Check("container toolkit", WARN, ", ".join(found), fix)
    return Check("container toolkit", OK, ", ".join(found))


def check_render(findings: Findings) -> Check:
    machine = findings.machine
    if not machine.amd_architectures:
        return Check("render group", OK, "not needed: no AMD GPU")
    if not machine.render_nodes:
        return Check("render group", FAIL, "no /dev/dri/renderD*", "load the driver (`modprobe amdgpu`)")
    groups = ", ".join(map(str, machine.device_groups)) or "root only"
    if not machine.device_groups:
        fix = 'give the devices to a group: udev\'s rule is KERNEL=="renderD*", GROUP="render", MODE="0660"'
        return Check("render group", WARN, groups, fix)
    return Check("render group", OK, f"GID {groups}")


def check_fabric(findings: Findings) -> Check:
    machine = findings.machine
    if not machine.hcas:
        return Check("infiniband", OK, "no active RDMA adapter: NCCL will use TCP")
    found = f"{machine.fabric}: {', '.join(machine.hcas)}"
    if not machine.rdma_devices:
        return Check("infiniband", FAIL, f"{found}, but no /dev/infiniband", "load the module (`modprobe ib_uverbs`)")
    return Check("infiniband", OK, found)


def check_shm(findings: Findings) -> Check:
    machine = findings.machine
    needed = shm_size(machine.ram_bytes)
    found = "no /dev/shm" if machine.shm_bytes is None else f"{machine.shm_bytes / 2**30:.1f} GiB"
    if machine.shm_bytes is not None and machine.shm_bytes >= needed:
        return Check("shm", OK, found)
    fix = (
        f"for apptainer and enroot, which use the host's: `mount -o remount,size={needed} /dev/shm`; "
        "docker's and podman's flags give containers their own"
    )
    return Check("shm", WARN, found, fix)


def check_memlock(findings: Findings) -> Check:
    limit = findings.machine.memlock
    if limit is None:
        return Check("memlock", OK, "unlimited")
    fix = "`* - memlock unlimited` in /etc/security/limits.conf: podman without root and apptainer cannot raise it"
    return Check("memlock", WARN, f"{limit / 2**20:.0f} MiB", fix)


def check_cgroup(findings: Findings) -> Check:
    version = findings.machine.cgroup
    if version == 2:
        return Check("cgroup", OK, "version 2")
    fix = "boot with systemd.unified_cgroup_hierarchy=1; podman without root cannot limit memory without it"
    return Check("cgroup", WARN, f"version {version}" if version else "none", fix)


def check_base(findings: Findings) -> Check:
    if findings.mmdebstrap:
        return Check("mmdebstrap", OK, "installed: bases can be made without a registry")
    return Check("mmdebstrap", WARN, "none", "where no registry answers: `apt-get install mmdebstrap`")


def check_numa(findings: Findings) -> Check:
    if findings.machine.amd_architectures and findings.numa_balancing:
        return Check("numa balancing", WARN, "on", "AMD's guide turns it off: `sysctl kernel.numa_balancing=0`")
    return Check("numa balancing", OK, "on" if findings.numa_balancing else "off")


CHECKS: tuple[Callable[[Findings], Check], ...] = (
    check_engine,
    check_buildx,
    check_disk,
    check_driver,
    check_toolkit,
    check_render,
    check_fabric,
    check_shm,
    check_memlock,
    check_cgroup,
    check_base,
    check_numa,
)
