"""Two images are compared file by file until the first difference."""

from pathlib import Path

import pytest

from buildkit.images.reproduce import find_difference
from tests.buildkit.images.test_archive import Files, fix, layer_of

BASE: Files = {"etc/os-release": (b"debian", 1)}
WHEELS: Files = {"a.py": (b"a", 1), "b.pyc": (b"b", 1)}


def test_equal_builds_have_no_difference(tmp_path: Path) -> None:
    first, second = (fix(tmp_path, name, layer_of(BASE), layer_of(WHEELS)) for name in "12")
    assert find_difference(first, second) is None


@pytest.mark.parametrize(("changed", "words"), [(b"c", "1 bytes"), (None, "absent")])
def test_the_first_file_that_differs_is_named(tmp_path: Path, changed: bytes | None, words: str) -> None:
    wheels = {**WHEELS, "b.pyc": (changed, 1)} if changed else {"a.py": WHEELS["a.py"]}
    difference = find_difference(
        fix(tmp_path, "1", layer_of(BASE), layer_of(WHEELS)), fix(tmp_path, "2", layer_of(BASE), layer_of(wheels))
    )
    assert difference
    assert (difference.layer, difference.file) == (2, "b.pyc")
    assert words in difference.second


def test_files_in_another_order_are_named(tmp_path: Path) -> None:
    turned = dict(reversed(WHEELS.items()))
    difference = find_difference(fix(tmp_path, "1", layer_of(WHEELS)), fix(tmp_path, "2", layer_of(turned)))
    assert difference
    assert difference.file == "the order of its files"


def test_a_different_configuration_is_named(tmp_path: Path) -> None:
    first, second = fix(tmp_path, "1", layer_of(BASE)), fix(tmp_path, "2", layer_of(BASE), os="another")
    difference = find_difference(first, second)
    assert difference
    assert difference.file == "os in the image's configuration"
    assert (difference.first, difference.second) == ("linux", "another")
