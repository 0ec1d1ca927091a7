"""Checks whether this host can build and run the images. Each check returns ok, warn or fail, a finding and a fix.

Checks are pure functions of the findings, and collecting findings never fails. `warn` means that some targets or
runtimes will not work, `fail` that nothing will, or that something here is broken.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from buildkit.host.accelerators import ACCELERATORS
from buildkit.host.files import read_text
from buildkit.host.machine import Machine
from buildkit.host.shared_memory import shm_size
from buildkit.recipe.matrix import Matrix

OK, WARN, FAIL = "ok", "warn", "fail"
PROBE_TIMEOUT = 3  # seconds for an engine to answer
ENGINES = ("docker", "podman")


@dataclass(frozen=True)
class HostCheck:
    check: str
    status: str
    value: str
    fix: str = ""


@dataclass(frozen=True)
class EngineFacts:
    """The answer of an engine on PATH; `problem` is empty when it works."""

    name: str
    version: str = ""
    storage: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Findings:
    """The input of the checks. `matrix` is None when no project was found."""

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
        return EngineFacts(name, problem="installed, but does not answer")
    if name == "podman":
        version, storage = document.get("version", {}).get("Version"), document.get("store", {}).get("graphRoot")
    else:
        version, storage = document.get("ServerVersion"), document.get("DockerRootDir")
        if not version:
            problem = "; ".join(document.get("ServerErrors") or []) or "its daemon does not answer"
            return EngineFacts(name, problem=problem)
    return EngineFacts(name, str(version or ""), str(storage or ""))


def answer(*command: str) -> str:
    """A command's stdout; empty when it cannot be started, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROBE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def free_bytes(path: Path) -> int:
    """Free space on the file system of `path`, which need not exist."""
    existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return 0


def examine(findings: Findings) -> list[HostCheck]:
    return [check(findings) for check in CHECKS]


def check_engine(findings: Findings) -> HostCheck:
    working = [engine for engine in findings.engines if not engine.problem]
    if working:
        return HostCheck("engine", OK, ", ".join(f"{engine.name} {engine.version}" for engine in working))
    if findings.engines:
        problems = "; ".join(f"{engine.name}: {engine.problem}" for engine in findings.engines)
        return HostCheck("engine", FAIL, problems, "start it (`systemctl start docker`), and be in the group docker")
    return HostCheck("engine", FAIL, "none", "install Docker or Podman; on Debian as root `ci/engine COMMAND` does it")


def check_buildx(findings: Findings) -> HostCheck:
    if findings.buildx:
        return HostCheck("buildx", OK, findings.buildx)
    if not any(engine.name == "docker" and not engine.problem for engine in findings.engines):
        return HostCheck("buildx", OK, "not needed: no docker answers")
    return HostCheck("buildx", WARN, "none", "install docker-buildx; without it images are not the same bytes twice")


def check_disk(findings: Findings) -> HostCheck:
    free = findings.free_bytes / 2**30
    if findings.matrix is None:
        return HostCheck("disk", WARN, f"{free:.0f} GiB free", "run from a checkout to compare it with the targets")
    needs = {name: target.disk_gib for name, target in findings.matrix.targets.items()}
    missing = [f"{name} {gib} GiB" for name, gib in needs.items() if gib > free]
    if not missing:
        return HostCheck("disk", OK, f"{free:.0f} GiB free, enough for every target")
    status = FAIL if len(missing) == len(needs) else WARN
    fix = f"free some for {', '.join(missing)}: `docker system df` shows what takes it"
    return HostCheck("disk", status, f"{free:.0f} GiB free", fix)


def check_driver(findings: Findings) -> HostCheck:
    """The driver against the oldest that each variant accepts, where the matrix names one."""
    accelerator = findings.machine.accelerator
    if accelerator is None:
        others = " and ".join(name for name, row in ACCELERATORS.items() if row.has_gpus)
        return HostCheck("gpu driver", WARN, "no GPU", f"enough to build, and to run target cpu; {others} need one")
    gpus = findings.machine.gpus[accelerator.target]
    kinds = f" ({', '.join(sorted(set(gpus.architectures)))})" if gpus.architectures else ""
    text = f"{accelerator.driver_module} {gpus.driver or 'of the kernel'}, {gpus.count} GPUs{kinds}"
    target = findings.matrix.targets.get(accelerator.target) if findings.matrix else None
    variants = target.variants.values() if target else []
    too_new = [variant for variant in variants if gpus.driver and older(gpus.driver, variant.driver)]
    if not too_new:
        return HostCheck("gpu driver", OK, text)
    least = ", ".join(f"{variant.name} needs {variant.driver}" for variant in too_new)
    status = FAIL if len(too_new) == len(variants) else WARN
    return HostCheck("gpu driver", status, text, f"update the driver: {least}")


def older(driver: str, minimum: str) -> bool:
    try:
        return bool(minimum) and Version(driver) < Version(minimum)
    except InvalidVersion:
        return False


def check_toolkit(findings: Findings) -> HostCheck:
    machine = findings.machine
    if not (machine.accelerator and machine.accelerator.container_toolkit):
        return HostCheck("container toolkit", OK, "not needed: no NVIDIA GPU")
    ways = [name for name, here in (("runtime", machine.container_toolkit), ("CDI", machine.cdi)) if here]
    if not ways:
        return HostCheck("container toolkit", FAIL, "none", "install nvidia-container-toolkit, restart the engine")
    if any(engine.name == "podman" for engine in findings.engines) and not machine.cdi:
        fix = "podman takes GPUs by CDI: `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"
        return HostCheck("container toolkit", WARN, ", ".join(ways), fix)
    return HostCheck("container toolkit", OK, ", ".join(ways))


def check_render(findings: Findings) -> HostCheck:
    machine = findings.machine
    if not (machine.accelerator and machine.accelerator.render_nodes):
        return HostCheck("render group", OK, "not needed: no GPU here is used through /dev/dri")
    if not machine.render_nodes:
        fix = f"load the driver (`modprobe {machine.accelerator.driver_module}`)"
        return HostCheck("render group", FAIL, "no /dev/dri/renderD*", fix)
    groups = ", ".join(map(str, machine.device_groups or ())) or "root only"
    if not machine.device_groups:
        fix = 'give the devices to a group: udev\'s rule is KERNEL=="renderD*", GROUP="render", MODE="0660"'
        return HostCheck("render group", WARN, groups, fix)
    return HostCheck("render group", OK, f"GID {groups}")


def check_fabric(findings: Findings) -> HostCheck:
    machine = findings.machine
    if not machine.hcas:
        return HostCheck("infiniband", OK, "no active RDMA adapter: NCCL will use TCP")
    text = f"{machine.fabric}: {', '.join(machine.hcas)}"
    if not machine.rdma_devices:
        return HostCheck(
            "infiniband", FAIL, f"{text}, but no /dev/infiniband", "load the module (`modprobe ib_uverbs`)"
        )
    return HostCheck("infiniband", OK, text)


def check_shm(findings: Findings) -> HostCheck:
    machine = findings.machine
    needed = shm_size(machine.ram_bytes)
    size = "no /dev/shm" if machine.shm_bytes is None else f"{machine.shm_bytes / 2**30:.1f} GiB"
    if machine.shm_bytes is not None and machine.shm_bytes >= needed:
        return HostCheck("shm", OK, size)
    fix = (
        f"for apptainer and enroot, which use the host's: `mount -o remount,size={needed} /dev/shm`; "
        "docker and podman give each container its own"
    )
    return HostCheck("shm", WARN, size, fix)


def check_memlock(findings: Findings) -> HostCheck:
    limit = findings.machine.memlock
    if limit is None:
        return HostCheck("memlock", OK, "unlimited")
    fix = "`* - memlock unlimited` in /etc/security/limits.conf: podman without root and apptainer cannot raise it"
    return HostCheck("memlock", WARN, f"{limit / 2**20:.0f} MiB", fix)


def check_cgroup(findings: Findings) -> HostCheck:
    version = findings.machine.cgroup
    if version == 2:
        return HostCheck("cgroup", OK, "version 2")
    fix = "boot with systemd.unified_cgroup_hierarchy=1; podman without root cannot limit memory without it"
    return HostCheck("cgroup", WARN, f"version {version}" if version else "none", fix)


def check_base(findings: Findings) -> HostCheck:
    if findings.mmdebstrap:
        return HostCheck("mmdebstrap", OK, "installed: bases can be made without a registry")
    return HostCheck("mmdebstrap", WARN, "none", "where no registry answers: `apt-get install mmdebstrap`")


def check_numa(findings: Findings) -> HostCheck:
    accelerator = findings.machine.accelerator
    if accelerator and accelerator.numa_balancing_hurts and findings.numa_balancing:
        fix = f"{accelerator.vendor}'s guide turns it off: `sysctl kernel.numa_balancing=0`"
        return HostCheck("numa balancing", WARN, "on", fix)
    return HostCheck("numa balancing", OK, "on" if findings.numa_balancing else "off")


CHECKS: tuple[Callable[[Findings], HostCheck], ...] = (
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
