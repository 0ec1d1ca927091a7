"""No input of `launch` causes a traceback: a few of those that `python -m tests.fuzz launch` draws."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entrypoints.environments.process_view import ProcessView
from tests.fuzz.damage import Target
from tests.fuzz.launch import TARGETS


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_damaged_inputs_are_read_or_refused(target: Target, seed: int) -> None:
    target.attempt(Random(seed))


def test_a_path_that_is_no_text_is_a_file_that_cannot_be_read() -> None:
    assert ProcessView(variables={}, hostname="n1").lines("\ud800") is None
    assert ProcessView(variables={}, hostname="n1").lines("/a\0b") is None
