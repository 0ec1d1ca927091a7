"""The table of exit codes in `errors` matches the classes; the reference page is generated from it."""

import re

import pytest

from entrypoints import errors
from entrypoints.errors import JobEndedError, LaunchError, StoppedError

OF_NO_CLASS = {1}
"""Python's own status for an exception that nobody handled."""
SET_PER_ERROR = {JobEndedError, StoppedError}
"""Their status depends on the job or on the signal."""


def codes_in_table(text: str) -> set[int]:
    return {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}


def codes_of_classes() -> dict[str, int]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LaunchError)]
    return {kind.__name__: kind.exit_code for kind in kinds if kind not in {LaunchError, *SET_PER_ERROR}}


def test_the_table_lists_the_code_of_every_class_and_no_other() -> None:
    assert errors.__doc__ is not None
    assert codes_in_table(errors.__doc__) == set(codes_of_classes().values()) | OF_NO_CLASS


def test_every_cause_has_a_code_of_its_own() -> None:
    codes = codes_of_classes()
    for subclass in ("NotYetThereError", "NodesUnknownError"):  # a DetectionError that something else may solve
        codes.pop(subclass)
    assert len(set(codes.values())) == len(codes)


def test_a_class_without_a_code_is_a_programming_error() -> None:
    with pytest.raises(AttributeError):
        _ = LaunchError("no cause").exit_code
