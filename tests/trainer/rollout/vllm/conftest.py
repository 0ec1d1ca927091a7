"""The simulated schedulers, which take a minute and serve two modules."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rollout.conftest import results_of


@pytest.fixture(scope="session")
def simulations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(Path(__file__).with_name("simulation.py"), tmp_path_factory.mktemp("simulations"))
