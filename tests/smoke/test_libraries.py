"""Accelerator and fabric libraries load, report their version, and miss no library."""

import json
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container
from testinfra.host import Host

PYTHON = "/opt/slipway/venv/bin/python"
PROGRAM = Path(__file__).with_name("needed_libraries.py")

# Libraries of the host's driver, or of plug-ins that are loaded only on their network.
FROM_THE_HOST = {
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libcudadebugger.so.1",
    "libnvcuvid.so.1",
    "libnvidia-encode.so.1",
}
PLUGINS = ("/nvshmem_transport_", "/nvshmem_bootstrap_", "/tc/")  # tc: of iproute2

RCCL_VERSION = (
    "import ctypes; version = ctypes.c_int(); "
    "print(ctypes.CDLL('librccl.so.1').ncclGetVersion(ctypes.byref(version)), version.value)"
)
NCCL_VERSION = "import torch.cuda.nccl as nccl; print('.'.join(map(str, nccl.version())))"


def only(target: str, wanted: str) -> None:
    if target != wanted:
        pytest.skip(f"the {target} image has no {wanted}")


def test_every_needed_library_is_in_the_image(sleeper: Container) -> None:
    roots = ["/opt/slipway", "/usr/lib", "/lib"]
    done = sleeper.exec_run([PYTHON, "-c", PROGRAM.read_text(), *roots, "--", "/opt/rocm"])
    missing: dict[str, list[str]] = json.loads(done.output)
    unexplained = {
        library: paths
        for library, objects in missing.items()
        if library not in FROM_THE_HOST and (paths := [path for path in objects if not any(p in path for p in PLUGINS)])
    }
    assert unexplained == {}


def test_rccl_loads_and_reports_its_version(host: Host, target: str, manifest: dict[str, Any]) -> None:
    only(target, "rocm")
    if "librccl1" not in manifest["packages"]:
        pytest.skip("RCCL is not a Debian package in this variant")
    status, version = host.check_output(f'{PYTHON} -c "{RCCL_VERSION}"').split()
    assert status == "0"
    assert int(version) > 20000


def test_rccl_has_code_for_the_variants_architectures(host: Host, target: str, manifest: dict[str, Any]) -> None:
    only(target, "rocm")
    if "librccl1" not in manifest["packages"]:
        pytest.skip("RCCL is not a Debian package in this variant")
    library = host.check_output("readlink -f /usr/lib/*-linux-gnu/librccl.so.1")
    assert [name for name in manifest["architectures"] if host.run(f"grep -qa {name} {library}").rc != 0] == []


@pytest.mark.parametrize("tool", ["rocminfo", "rocm-smi"])
def test_rocm_tools_start(host: Host, target: str, manifest: dict[str, Any], tool: str) -> None:
    only(target, "rocm")
    if tool not in manifest["packages"]:
        pytest.skip(f"{tool} is not a Debian package in this variant")
    done = host.run(f"{tool} --help" if tool == "rocm-smi" else tool)
    assert done.rc != 127
    assert "error while loading shared libraries" not in done.stderr + done.stdout


def test_nccl_loads_and_reports_its_version(host: Host, target: str, manifest: dict[str, Any]) -> None:
    only(target, "cuda")
    version = host.check_output(f'{PYTHON} -c "{NCCL_VERSION}"')
    assert manifest["pins"]["nvidia-nccl-cu13"].startswith(version)


def test_infiniband_user_space_is_complete(host: Host) -> None:
    for driver in ("mlx5", "bnxt_re", "efa"):
        assert host.file(f"/etc/libibverbs.d/{driver}.driver").exists
    assert host.run("ibv_devinfo").rc != 127


def test_bandwidth_tools_start_on_hosts_with_a_fabric(host: Host, target: str) -> None:
    if target == "cpu":
        pytest.skip("the cpu image is for rehearsals without a fabric")
    assert host.run("ib_write_bw --version").rc != 127


def test_a_gpu_computes(host: Host, target: str) -> None:
    if target == "cpu":
        pytest.skip("the cpu image uses no GPU")
    if not (host.file("/dev/nvidiactl").exists or host.file("/dev/kfd").exists):
        pytest.skip("this host has no GPU")
    host.check_output(f"{PYTHON} -c 'import torch; x = torch.ones(8, 8, device=\"cuda\"); assert (x @ x).sum() == 512'")
