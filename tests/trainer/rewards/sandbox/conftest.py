"""Each test of this folder runs on every kind of machine that this one can be."""

import shutil
from collections.abc import Iterator

import pytest

from tests.trainer.rewards.sandbox.machines import MACHINES, Machine, on


@pytest.fixture(scope="module", params=MACHINES, ids=str)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with on(request.param) as machine:
        if machine.bubblewrap:
            if shutil.which("bwrap") is None:
                pytest.skip("bubblewrap is not installed")
            if "bubblewrap does not work" in (note := str(machine.call("check"))):
                pytest.skip(note)
        yield machine
