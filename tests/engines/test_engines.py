"""One image, built and run in four ways: docker with and without buildx, podman with and without root."""

import json
import shutil

import pytest

from tests.engines.conftest import Buildkit, Setting

pytestmark = pytest.mark.timeout(1200)

COUNT_NODES = "import ray; ray.init(log_to_driver=False); print('alive', sum(node['Alive'] for node in ray.nodes()))"


@pytest.fixture(scope="module")
def image(buildkit: Buildkit) -> dict[str, object]:
    """The engine's own cpu image, built by it."""
    done = buildkit("build", "--json", "--progress", "plain")
    assert done.returncode == 0, done.stderr[-4000:]
    document: dict[str, object] = json.loads(done.stdout)
    return document


def test_the_image_is_built_and_listed(image: dict[str, object]) -> None:
    assert image["image_id"]
    assert 10**9 < int(str(image["size"])) < 5 * 10**9


def test_a_container_gets_its_shared_memory_and_user_and_returns_its_status(
    buildkit: Buildkit, image: dict[str, object], setting: Setting
) -> None:
    runs = setting.folder / "runs"
    runs.mkdir()
    shutil.chown(runs, setting.folder.stat().st_uid, setting.folder.stat().st_gid)
    code = 'df --output=size -B1 /dev/shm | tail -1; touch "/runs/$(id -u)"; exit 3'
    done = buildkit("run", "--output", str(runs), "--", "--no-ray", "--", "sh", "-c", code)
    assert done.returncode == 3, done.stderr
    assert int(done.stdout.split()[-1]) > 2**30
    (written,) = runs.iterdir()
    assert written.name == str(written.stat().st_uid) == str(setting.folder.stat().st_uid), "it belongs to the caller"


def test_the_trainer_imports(buildkit: Buildkit, image: dict[str, object]) -> None:
    done = buildkit(
        "run", "--", "--no-ray", "--", "python", "-c", "import torch, ray, vllm, trainer.config.tree; print('in')"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("in\n")


def test_two_nodes_form_one_cluster(buildkit: Buildkit, image: dict[str, object]) -> None:
    done = buildkit("run", "--nodes", "2", "--", "--", "python", "-c", COUNT_NODES)
    assert done.returncode == 0, done.stderr
    assert "alive 2" in done.stdout


def test_nothing_is_left(buildkit: Buildkit, setting: Setting, image: dict[str, object]) -> None:
    done = buildkit("run", "--name", "slipway-left", "--", "--no-ray", "--", "true")
    assert done.returncode == 0, done.stderr
    assert setting.call(setting.engine, "ps", "--all", "--filter", "name=slipway-left", "--quiet").stdout == ""
