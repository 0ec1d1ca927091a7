"""Image names in registries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.errors import UsageError
from buildkit.registry.reference import REFERENCE, Reference, parse_reference

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("ghcr.io/team/slipway:cpu", Reference("ghcr.io", "team/slipway", "cpu")),
        ("localhost:5000/slipway", Reference("localhost:5000", "slipway")),
        ("localhost/slipway", Reference("localhost", "slipway")),
        ("127.0.0.1:5000/a/b/c__d", Reference("127.0.0.1:5000", "a/b/c__d")),
        ("[::1]:5000/slipway", Reference("[::1]:5000", "slipway")),
        (f"r.example/s:t@{DIGEST}", Reference("r.example", "s", "t", DIGEST)),
        ("http://127.0.0.1:5000/s", Reference("127.0.0.1:5000", "s", secure=False)),
        ("https://r.example/s", Reference("r.example", "s")),
    ],
)
def test_reference_is_parsed(text: str, reference: Reference) -> None:
    assert parse_reference(text) == reference


@pytest.mark.parametrize(
    "text",
    [
        "slipway",
        "team/slipway",
        "r.example/",
        "r.example/Team",
        "r.example/s:",
        "r.example/s@sha256:12",
        "r.example//s",
        "",
    ],
)
def test_invalid_reference_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="names no image"):
        parse_reference(text)


@given(st.from_regex(REFERENCE, fullmatch=True))
def test_reference_survives_a_round_trip(text: str) -> None:
    try:
        reference = parse_reference(text)
    except UsageError:
        return
    again = parse_reference(str(reference))
    assert (again.host, again.repository, again.digest) == (reference.host, reference.repository, reference.digest)
    assert str(again) == str(reference)
