"""Programs that try to leave their sandbox, in real sandboxes."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.rewards.sandbox.attacks import ATTACKS, READING, attacker
from tests.trainer.rewards.sandbox.machines import Machine

REFUSED_BY_DOCKER = ("keep a key", "leave what is shared", "set the kernel's parameters")
DATAGRAMS = f"\0slipway-attack-{os.getpid()}"


@pytest.fixture(scope="module", autouse=True)
def datagrams() -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(DATAGRAMS)
        yield


def targets(folder: Path) -> tuple[str, str]:
    """A private file and a folder, which belong to whom the folder belongs."""
    private, shared = folder / "private", folder / "shared"
    private.write_text("hidden")
    private.chmod(0o600)
    shared.mkdir(mode=0o700)
    for path in (private, shared):
        os.chown(path, folder.stat().st_uid, folder.stat().st_gid)
    return str(private), str(shared)


@pytest.fixture(scope="module")
def outcomes(machine: Machine) -> dict[str, str | None]:
    """What became of each attack."""
    program = attacker("CLIENT", *targets(machine.folder), DATAGRAMS)
    return dict(zip(ATTACKS, machine.outputs(program, list(ATTACKS)), strict=True))


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused(machine: Machine, outcomes: dict[str, str | None], name: str) -> None:
    if not (machine.reads_files and name in READING):
        assert outcomes[name] == "refused"


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_succeeds_outside_of_a_sandbox(name: str, tmp_path: Path) -> None:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if "memory" in name and scope.exists() and scope.read_text().strip() != "0":
        pytest.skip("this kernel protects the memory of processes")
    if name in REFUSED_BY_DOCKER and "\nSeccomp:\t0" not in Path("/proc/self/status").read_text():
        pytest.skip("this container refuses it, too")
    program = attacker(str(os.getpid()), *targets(tmp_path), DATAGRAMS)
    ended = subprocess.run(
        [sys.executable, "-c", program], input=name, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "escaped" in ended.stdout, ended


def test_the_run_says_what_confines_programs_and_what_does_not(machine: Machine) -> None:
    note = machine.call("check")
    if machine.bubblewrap:
        assert note == "programs are confined by bubblewrap"
    else:
        confined = "programs are confined by a filter of system calls alone (bubblewrap is not installed)"
        assert note.startswith(confined)
        can = "read the files of this user and read the environment variables of this user"
        assert note.removeprefix(confined) == (f", and can {can}" if machine.reads_files else "")
