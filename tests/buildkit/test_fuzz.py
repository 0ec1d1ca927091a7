"""No input of `buildkit` causes a traceback: a few of those that `python -m tests.fuzz build` draws."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buildkit.errors import InventoryError, MatrixError, UsageError
from buildkit.host.settings import read_mirrors
from buildkit.publishing.inventory import MANIFEST, STATUS, read_inventory
from tests.fuzz.build import FILES, TARGETS, read_matrix
from tests.fuzz.damage import Target


@pytest.mark.parametrize("target", TARGETS, ids=[target.name for target in TARGETS])
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_damaged_inputs_are_read_or_refused(target: Target, seed: int) -> None:
    target.attempt(Random(seed))


@pytest.mark.parametrize(
    "content", ["schema = 1\nwheel_layers = 1", "schema = " + "9" * 5000, "[bases]\na = 1\nschema"]
)
def test_a_matrix_with_values_of_other_types_is_refused(content: str) -> None:
    with pytest.raises(MatrixError):
        read_matrix(content)


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (MANIFEST, b"[1]"),
        (STATUS, b"Package: a\nStatus: install ok installed\nVersion: 1\n"),
        ("opt/slipway/venv/lib/python3.11/site-packages/a-1.dist-info/METADATA", b"Metadata-Version: 2.1\n"),
    ],
)
def test_an_inventory_without_what_it_needs_is_refused(path: str, content: bytes) -> None:
    with pytest.raises(InventoryError):
        read_inventory({name: text.encode() for name, text in FILES.items()} | {path: content})


def test_a_mirror_that_is_no_address_is_refused() -> None:
    with pytest.raises(UsageError, match="is not ADDRESS=MIRROR"):
        read_mirrors("docker.io=https://[x")
