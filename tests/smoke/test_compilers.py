"""The compilers of kernels start in the cuda image, find their headers and libraries, and need no GPU for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container
from testinfra.host import Host

PROGRAM = Path(__file__).with_name("compile_kernels.py")


@pytest.fixture(autouse=True)
def _with_compilers(target: str) -> None:
    if target != "cuda":
        pytest.skip(f"the {target} image compiles no CUDA kernels")


def test_the_compiler_is_of_the_release_of_torch(host: Host, manifest: dict[str, Any]) -> None:
    version = manifest["pins"]["nvidia-cuda-runtime"].split(".")
    assert f"release {version[0]}.{version[1]}," in host.check_output("nvcc --version")
    assert host.check_output("python -c 'import torch; print(torch.version.cuda)'") == ".".join(version[:2])


def test_triton_nvcc_and_flashinfer_compile_kernels(start: Callable[..., Container], manifest: dict[str, Any]) -> None:
    container = start(
        *("python", "/compile_kernels.py", "/tmp", *manifest["architectures"]),
        volumes=[f"{PROGRAM}:/compile_kernels.py:ro"],
        environment={"FLASHINFER_CUDA_ARCH_LIST": "9.0a"},
        user="12345:12345",
    )
    status = container.wait(timeout=600)["StatusCode"]
    assert status == 0, container.logs().decode()
