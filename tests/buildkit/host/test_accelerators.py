"""A new accelerator is one row, beside its tables in `images/`; the rest of buildkit follows from the row."""

from pathlib import Path

import pytest
import yaml

from buildkit.errors import MatrixError
from buildkit.host.accelerators import ACCELERATORS, Accelerator, render_node_flags
from buildkit.host.machine import read_machine
from buildkit.recipe.dockerfile import render_dockerfile
from buildkit.recipe.matrix import load_matrix
from buildkit.running.flags import RunRequest, assume, container_flags
from buildkit.running.formats import kubernetes_text
from buildkit.running.slurm import slurm_text
from tests.buildkit.conftest import ROOT

XPU = Accelerator(
    "xpu",
    vendor="Intel",
    flags=render_node_flags,
    resource="gpu.intel.com/xe",
    driver_module="xe",
    render_nodes=True,
    device_files=("/dev/dri/renderD*",),
)
TABLE = """
[targets.xpu]
disk_gib = 1
summary = "Intel GPUs"
[targets.xpu.variants.first]
base = "debian12"
status = "untested"
requirements = ["six==1.17.0"]
"""
ENVIRONMENT = '[[env]]\nname = "ZE_AFFINITY_MASK"\nvalue = "0"\nreason = "r"\nsource = "https://example.org"\n'


@pytest.fixture
def xpu_project(project: Path) -> Path:
    with (project / "images" / "matrix.toml").open("a") as file:
        file.write(TABLE)
    (project / "images" / "env" / "xpu.toml").write_text(ENVIRONMENT)
    return project


def test_one_row_makes_a_target(xpu_project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCELERATORS, "xpu", XPU)
    matrix = load_matrix(xpu_project)
    assert "ENV ZE_AFFINITY_MASK=0" in render_dockerfile(matrix, matrix.variant("xpu"), "registry", {})

    request = RunRequest("slipway:xpu", "xpu", ("train",), gpus=2, name="job")
    machine = assume(read_machine(xpu_project), "xpu", gpus=4)
    flags = container_flags(request, machine)
    assert [flag.value for flag in flags if flag.name == "device"] == ["/dev/dri/renderD128", "/dev/dri/renderD129"]

    images = ROOT / "images"
    job = list(yaml.safe_load_all(kubernetes_text(request, machine, flags, images)))[1]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"gpu.intel.com/xe": 2}
    script = slurm_text(request, machine, images)
    assert "#SBATCH --gpus-per-node=2" in script
    assert "for device in /dev/dri/renderD*; do" in script


def test_a_target_without_a_row_is_refused(xpu_project: Path) -> None:
    with pytest.raises(MatrixError, match=r"targets\.xpu: unknown accelerator `xpu`") as caught:
        load_matrix(xpu_project)
    assert "buildkit/host/accelerators.py" in caught.value.hint
