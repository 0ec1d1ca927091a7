"""`ci/publish` puts the real cpu image into a real registry, which is killed in the middle of the first push.

Publishes the last commit, whatever the checkout has.

Needs a container engine and minutes, so plain `pytest` does not collect it. Run it with
`ci/engine pytest tests/publish/end_to_end.py`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.publish.conftest import PASSWORD, ROOT, USER, Server, docker_config

REPOSITORY = "team/slipway"
SOME_LAYERS = 30e6  # bytes in the registry's storage that show that the push has started


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A clean checkout of the last commit, with the installed tools."""
    folder = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    for name in (".venv", "build"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def start_publishing(source: Path, server: Server, key: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "SLIPWAY_CI_READY": "1",
        "SLIPWAY_REGISTRY": f"{server.host}/{REPOSITORY}",
        "SLIPWAY_REGISTRY_CA": str(server.ca),
        "SLIPWAY_REGISTRY_USER": USER,
        "SLIPWAY_REGISTRY_PASSWORD": PASSWORD,
        "SLIPWAY_SIGN_KEY": str(key),
        "COSIGN_PASSWORD": "",
        "PYTEST_ADDOPTS": "-k 'labels or manifest'",  # the whole smoke tests have their own step in ci/test
    }
    return subprocess.Popen(
        [str(source / "ci/publish"), "cpu"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
        start_new_session=True,
    )


def wait_for_push(server: Server, publisher: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end and publisher.poll() is None:
        if server.stored_bytes() > SOME_LAYERS:
            return
        time.sleep(0.2)
    pytest.fail(f"nothing was pushed; the publisher's status is {publisher.poll()}")


@pytest.mark.timeout(1800)
def test_killed_push_promotes_nothing_and_publishing_again_finishes(
    source: Path, own_server: Server, keys: Path, tmp_path: Path
) -> None:
    publisher = start_publishing(source, own_server, keys / "cosign.key")
    wait_for_push(own_server, publisher)
    own_server.kill()  # the engine would retry for a minute; a person would interrupt it
    time.sleep(1)
    os.killpg(publisher.pid, signal.SIGINT)
    publisher.communicate(timeout=60)
    assert publisher.returncode == 128 + signal.SIGINT
    assert own_server.tags(REPOSITORY) == set()

    own_server.start()
    publisher = start_publishing(source, own_server, keys / "cosign.key")
    output, _ = publisher.communicate(timeout=900)
    assert publisher.returncode == 0
    moving = f"{own_server.host}/{REPOSITORY}:cpu"
    assert output.split()[-1] == moving

    config = docker_config(tmp_path, own_server.host)
    verify = [sys.executable, "-c", "from buildkit.cli import main; main()", "verify", "--published", moving]
    done = subprocess.run(
        [*verify, "--key", str(keys / "cosign.pub"), "--registry-ca", str(own_server.ca), "--rebuild"],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DOCKER_CONFIG": str(config)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "exactly those installed" in done.stderr
    assert "without cache has the same files and configuration" in done.stderr
