"""The cpu image as a SIF under real Apptainer: a plain user, a read-only root file system.

Debian's stable releases have no Apptainer. Where this host has none, it comes from Debian unstable, in a root file
system of its own.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buildkit.images.export import export_image
from buildkit.running.engine import Docker
from tests.engines.conftest import ROOT, need

pytestmark = pytest.mark.timeout(1200)

IMAGE, FILE = "slipway:cpu", "slipway_cpu.sif"
PACKAGES = "apptainer,ca-certificates,squashfs-tools,squashfuse"
CLUSTER = "import ray; ray.init(address='auto', log_to_driver=False); print('CPUs', ray.cluster_resources()['CPU'])"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of the plain user, with the image as a SIF; `apptainer` is on PATH."""
    folder = tmp_path_factory.mktemp("sif")
    with pytest.MonkeyPatch.context() as patch:
        if shutil.which("apptainer") is None:
            patch.setenv("PATH", f"{unstable(tmp_path_factory.mktemp('apptainer'), folder)}:{os.environ['PATH']}")
        export_image(Docker(), IMAGE, "sif", folder / FILE)
        yield folder


def unstable(place: Path, folder: Path) -> Path:
    """A folder with an `apptainer` that runs in a root file system of Debian unstable."""
    need("docker")
    need("mmdebstrap")
    if os.getuid() != 0:
        pytest.skip("Apptainer is not installed, and only root can make a root file system for it")
    tar, root, tools = place / "root.tar", place / "root", place / "bin"
    command = ("mmdebstrap", "--quiet", "--variant=minbase", '--aptopt=Acquire::Check-Valid-Until "false"')
    done = subprocess.run(
        [*command, f"--include={PACKAGES}", "sid", str(tar)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"Debian unstable cannot be reached: {done.stderr[-500:]}")
    root.mkdir()
    subprocess.run(["tar", "-xf", tar, "-C", root, "--exclude=./dev/*"], check=True)
    tar.unlink()
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    with (root / "etc" / "passwd").open("a") as users:
        users.write(f"plain:x:1000:1000::{folder}:/bin/bash\n")
    os.chown(folder, 1000, 1000)
    tools.mkdir()
    script = shlex.join([str(ROOT / "tests" / "engines" / "apptainer"), str(root), str(folder)])
    (tools / "apptainer").write_text(f'#!/bin/sh\nexec {script} "$@"\n')
    (tools / "apptainer").chmod(0o755)
    if subprocess.run([tools / "apptainer", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may make no mount namespace")
    return tools


@pytest.fixture
def run(folder: Path) -> Run:
    """Runs a command in the image with the line that `buildkit run --print apptainer` prints."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        words = ("buildkit", "run", "--target", "cpu", "--image", IMAGE, "--cache", "none", "--print", "apptainer")
        line = subprocess.run((*words, "--", *command), cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, check=False)

    return run


def test_sif_passes_the_commands_status_through(run: Run) -> None:
    done = run("--no-ray", "--", "sh", "-c", "id -u; exit 7")
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines()[-1] != "0"


def test_sif_is_read_only_for_a_plain_user(run: Run) -> None:
    done = run("--no-ray", "--", "sh", "-c", "touch /opt/slipway/x /workspace/y")
    assert done.returncode != 0
    assert done.stderr.count("Read-only file system") == 2


def test_sif_holds_the_trainer(run: Run) -> None:
    done = run("--no-ray", "--", "python3", "-c", "import torch, vllm, trainer.main_ppo; print(torch.__version__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2.")


def test_sif_forms_a_ray_cluster(run: Run) -> None:
    done = run("--single", "--", "python3", "-c", CLUSTER)
    assert done.returncode == 0, done.stderr
    assert "CPUs" in done.stdout
