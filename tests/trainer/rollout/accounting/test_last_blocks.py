"""The shortcut through vLLM's accounting: the same answers, and far fewer questions."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.rollout.conftest import found_by

PROGRAM = Path(__file__).with_name("last_blocks_program.py")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(PROGRAM, tmp_path_factory.mktemp("last-blocks"))


@pytest.fixture(params=["prefix_caching=True", "prefix_caching=False"])
def found(both: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    return both[request.param]


def test_responses_are_the_same_with_the_shortcut(found: dict[str, Any]) -> None:
    assert found["in place"]
    assert found["shortened"] == found["whole"] == found["compared"]


def test_wherever_it_is_taken_vllm_would_have_given_no_block_and_changed_nothing(found: dict[str, Any]) -> None:
    assert found["wrong"] == 0


def test_vllm_is_asked_about_once_per_block(found: dict[str, Any]) -> None:
    tokens = sum(map(len, found["whole"]))
    assert found["taken back"] > 0  # the cache was too small for all at once
    assert found["skipped"] > 0.85 * tokens
    assert found["asked"] >= tokens > 8 * 128
