import pytest

from entrypoints.logs import quoted


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("eth0", "eth0"),
        ("n[1-2]", "n[1-2]"),
        ("=eth0", "'=eth0'"),
        ("^docker0", "'^docker0'"),
        ("a b", "'a b'"),
        ("", "''"),
    ],
)
def test_values_that_would_be_misread_after_a_name_are_quoted(value: str, shown: str) -> None:
    assert quoted(value) == shown
