"""The real cpu image into a real registry through `ci/publish`, with the registry killed in the middle of the push.

Needs a container engine and minutes, so plain `pytest` leaves it alone: `ci/engine pytest tests/publish/end_to_end.py`.
"""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.publish.conftest import PASSWORD, ROOT, USER, Server

REPOSITORY = "team/slipway"
SOME_LAYERS = 50e6  # bytes in the registry's storage by which the push is in full swing


def publish(server: Server, key: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "SLIPWAY_CI_READY": "1",
        "SLIPWAY_REGISTRY": f"{server.host}/{REPOSITORY}",
        "SLIPWAY_REGISTRY_CA": str(server.ca),
        "SLIPWAY_REGISTRY_USER": USER,
        "SLIPWAY_REGISTRY_PASSWORD": PASSWORD,
        "SLIPWAY_SIGN_KEY": str(key),
        "COSIGN_PASSWORD": "",
    }
    command = [str(ROOT / "ci/publish"), "cpu"]
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def kill_in_full_swing(server: Server) -> None:
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if sum(path.stat().st_size for path in server.storage.rglob("data") if path.is_file()) > SOME_LAYERS:
            break
        time.sleep(0.2)
    server.kill()


@pytest.mark.timeout(1500)
def test_killed_push_promotes_nothing_and_publishing_again_finishes(own_server: Server, keys: Path) -> None:
    killer = threading.Thread(target=kill_in_full_swing, args=(own_server,))
    killer.start()
    stopped = publish(own_server, keys / "cosign.key")
    killer.join()
    assert stopped.returncode == 22, stopped.stderr[-3000:]
    assert "no tag was promoted, and running this again sends only what is missing" in stopped.stderr
    assert own_server.tags(REPOSITORY) == set()

    own_server.start()
    done = publish(own_server, keys / "cosign.key")
    assert done.returncode == 0, done.stderr[-3000:]
    names = done.stdout.split()
    assert names[-1] == f"{own_server.host}/{REPOSITORY}:cpu"

    again = publish(own_server, keys / "cosign.key")
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stdout == done.stdout
