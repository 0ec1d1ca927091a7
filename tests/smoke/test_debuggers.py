"""The debuggers in an image built with `--with-debug`."""

from collections.abc import Callable
from typing import Any

import pytest
from docker.models.containers import Container
from testinfra.host import Host


@pytest.fixture(autouse=True)
def _with_debuggers(manifest: dict[str, Any]) -> None:
    if not manifest["variant"].endswith("-debug"):
        pytest.skip("this image is built without debuggers")


@pytest.mark.parametrize("command", ["python -m debugpy --version", "py-spy --version", "gdb --version"])
def test_debuggers_start(host: Host, command: str) -> None:
    assert host.run(command).rc == 0


def test_a_running_program_can_be_inspected(start: Callable[..., Container]) -> None:
    code = "python -c 'import time; time.sleep(60)' & sleep 2; py-spy dump --pid $!; kill $!"
    container = start("--no-ray", "--", "sh", "-c", code, cap_add=["SYS_PTRACE"])  # as `buildkit run` adds it
    container.wait(timeout=60)
    assert "<module>" in container.logs().decode()


def test_rays_post_mortem_debugger_is_set_up(host: Host) -> None:
    code = "from ray.util import rpdb; print(rpdb._is_ray_debugger_post_mortem_enabled())"
    assert host.check_output(f'python -c "{code}"') == "True"
