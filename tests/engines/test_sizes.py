"""The sizes that the pages quote are those of the images that were built on this engine."""

import json
import subprocess

import pytest

from tests.docs.test_image_sizes import SIZES, TOLERANCE
from tests.engines.conftest import need


@pytest.mark.parametrize(("target", "variant"), SIZES)
def test_a_built_image_has_its_recorded_size(target: str, variant: str) -> None:
    need("docker")
    command = ["docker", "image", "inspect", f"slipway:{target}-{variant}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no image of {target}-{variant} was built here")
    (image,) = json.loads(done.stdout)
    assert SIZES[target, variant]["bytes"] == pytest.approx(image["Size"], rel=TOLERANCE)
