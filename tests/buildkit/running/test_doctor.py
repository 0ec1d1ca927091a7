"""The checks of `buildkit doctor` on recorded hosts, and the command on bare hosts."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildkit.host.machine import read_machine
from buildkit.recipe.matrix import Matrix
from buildkit.running.doctor import CHECKS, FAIL, OK, WARN, EngineFacts, Findings, HostCheck, examine
from tests.buildkit.command import run_buildkit
from tests.buildkit.hosts import BARE, DGX, MI300X, P5, Host

ROOT = Path(__file__).parents[3]
DOCKER = EngineFacts("docker", "26.1.5", "/var/lib/docker")


def findings(root: Path, matrix: Matrix | None, host: Host = BARE, **changes: Any) -> Findings:
    machine = replace(read_machine(host.write(root)), device_groups=(44, 109), shm_bytes=2**50)
    examined = Findings(machine, matrix, (DOCKER,), "github.com/docker/buildx 0.13.1", 500 * 2**30, True, False)
    if driver := changes.pop("driver", None):
        machine = replace(machine, gpus={**machine.gpus, "cuda": replace(machine.gpus["cuda"], driver=driver)})
    examined = replace(examined, machine=machine)
    machine_changes = {key: changes.pop(key) for key in list(changes) if hasattr(machine, key)}
    return replace(examined, machine=replace(machine, **machine_changes), **changes)


def check(name: str, examined: Findings) -> HostCheck:
    return next(check for check in examine(examined) if check.check == name)


@pytest.mark.parametrize("host", [DGX, MI300X, P5])
def test_a_healthy_gpu_host_passes_every_check(tmp_path: Path, matrix: Matrix, host: Host) -> None:
    checks = examine(findings(tmp_path, matrix, replace(host, memlock="unlimited")))
    assert {check.check: check.fix for check in checks if check.status != OK} == {}


def test_every_failed_check_has_a_fix(tmp_path: Path) -> None:
    worst = findings(
        tmp_path, None, Host(memlock="65536", cgroup=1, nvidia=1), engines=(), buildx="", mmdebstrap=False,
        free_bytes=0, shm_bytes=None, numa_balancing=True,
    )  # fmt: skip
    checks = examine(worst)
    assert len(checks) == len(CHECKS)
    assert all(check.fix for check in checks if check.status != OK)
    assert {check.status for check in checks} == {OK, WARN, FAIL}


@pytest.mark.parametrize(
    ("name", "host", "changes", "status", "words"),
    [
        ("engine", BARE, {"engines": ()}, FAIL, "install"),
        ("engine", BARE, {"engines": (EngineFacts("docker", problem="no daemon"),)}, FAIL, "systemctl start docker"),
        ("engine", BARE, {"engines": (EngineFacts("docker", problem="x"), EngineFacts("podman", "5"))}, OK, ""),
        ("buildx", BARE, {"buildx": ""}, WARN, "docker-buildx"),
        ("buildx", BARE, {"buildx": "", "engines": (EngineFacts("podman", "5"),)}, OK, ""),
        ("disk", BARE, {"free_bytes": 20 * 2**30}, WARN, "for cuda "),
        ("disk", BARE, {"free_bytes": 2**30}, FAIL, "for cpu "),
        ("gpu driver", BARE, {}, WARN, "cpu"),
        ("gpu driver", DGX, {"driver": "535.183.01"}, FAIL, "580.65.06"),
        ("gpu driver", DGX, {"driver": "580.65.06"}, OK, ""),
        ("container toolkit", DGX, {"container_toolkit": False, "cdi": False}, FAIL, "nvidia-container-toolkit"),
        ("container toolkit", DGX, {"cdi": False, "engines": (EngineFacts("podman", "5"),)}, WARN, "nvidia-ctk cdi"),
        ("render group", MI300X, {"render_nodes": ()}, FAIL, "modprobe amdgpu"),
        ("render group", MI300X, {"device_groups": ()}, WARN, "udev"),
        ("infiniband", DGX, {"rdma_devices": False}, FAIL, "ib_uverbs"),
        ("infiniband", BARE, {}, OK, ""),
        ("shm", BARE, {"shm_bytes": 2**26}, WARN, "remount"),
        ("memlock", MI300X, {}, WARN, "limits.conf"),
        ("cgroup", Host(cgroup=1), {}, WARN, "unified"),
        ("mmdebstrap", BARE, {"mmdebstrap": False}, WARN, "apt-get install"),
        ("numa balancing", MI300X, {"numa_balancing": True}, WARN, "sysctl"),
        ("numa balancing", DGX, {"numa_balancing": True}, OK, ""),
    ],
)
def test_check(
    tmp_path: Path, matrix: Matrix, name: str, host: Host, changes: dict[str, Any], status: str, words: str
) -> None:
    result = check(name, findings(tmp_path, matrix, host, **changes))
    assert (result.check, result.status) == (name, status)
    assert words in result.fix


def doctor(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_buildkit("doctor", *arguments, cwd=cwd, environment={"HOME": "/nonexistent", **environment})


def test_a_host_without_any_program_fails_with_a_message() -> None:
    done = doctor("--json", PATH="/nonexistent")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert all(set(entry) == {"check", "status", "value", "fix"} for entry in document)
    assert all(entry["status"] in (OK, WARN, FAIL) for entry in document)
    assert next(entry for entry in document if entry["check"] == "engine")["status"] == FAIL
    assert done.stderr == ""


def test_the_table_names_the_fix() -> None:
    done = doctor(PATH="/nonexistent")
    assert "ci/engine" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_hanging_engine_does_not_block_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    (tmp_path / "docker").chmod(0o755)
    done = doctor("--json", PATH=str(tmp_path))
    result = next(entry for entry in json.loads(done.stdout) if entry["check"] == "engine")
    assert "docker" in result["value"]


def test_outside_a_checkout_the_host_is_still_checked(tmp_path: Path) -> None:
    done = doctor("--json", "--project", str(tmp_path), PATH="/nonexistent")
    assert done.returncode == 1
    checks = [entry["check"] for entry in json.loads(done.stdout)]
    assert checks[0] == "project"
    assert "gpu driver" in checks
