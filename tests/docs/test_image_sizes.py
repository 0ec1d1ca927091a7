"""The sizes of images in the pages are those of one file, and that file agrees with the locks."""

import re
import tomllib
from pathlib import Path

import pytest

from buildkit.images.plan import make_plan
from buildkit.recipe.lock_file import find_lock
from buildkit.recipe.matrix import load_matrix

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    (target, variant): entry
    for target, variants in tomllib.loads((ROOT / "benchmarks/image_sizes.toml").read_text()).items()
    for variant, entry in variants.items()
}
TOLERANCE = 0.05  # a plan is a prediction, and locks are refreshed more often than images are built


@pytest.mark.parametrize(("target", "variant"), SIZES)
def test_the_recorded_size_is_that_of_the_lock(target: str, variant: str, tmp_path: Path) -> None:
    matrix = load_matrix(ROOT)
    pinned = matrix.variant(target, variant)
    planned = make_plan(matrix, pinned, find_lock(matrix, pinned), tmp_path).total_bytes
    assert SIZES[target, variant]["bytes"] == pytest.approx(planned, rel=TOLERANCE)


def quoted(target: str, variant: str) -> str:
    entry = SIZES[target, variant]
    return f"{entry['bytes'] / 1e9:.1f}" + ("" if "built" in entry else " (planned)")


def test_the_readme_quotes_the_recorded_sizes() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(cpu|cuda|rocm)`.* \| ([^|]+) \|$", readme, re.MULTILINE))
    matrix = load_matrix(ROOT)
    assert rows == {
        "cpu": quoted("cpu", matrix.targets["cpu"].default.name),
        "cuda": quoted("cuda", matrix.targets["cuda"].default.name),
        "rocm": quoted("rocm", "rocm-debian"),
    }


def test_the_guide_quotes_the_recorded_sizes() -> None:
    guide = (ROOT / "docs/guides/images.md").read_text(encoding="utf-8")
    section = guide.partition("## Variants of `cuda`")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([^`]+)` \|[^|]+\| ([\d.]+) GB", section, re.MULTILINE))
    cuda = {variant for target, variant in SIZES if target == "cuda"}
    assert set(rows) >= {variant for variant in load_matrix(ROOT).targets["cuda"].variants if variant in cuda}
    assert {name: rows[name] for name in cuda} == {name: f"{SIZES['cuda', name]['bytes'] / 1e9:.1f}" for name in cuda}


@pytest.mark.parametrize(("target", "variant"), SIZES)
def test_a_variant_that_cannot_train_is_said_to(target: str, variant: str) -> None:
    if not load_matrix(ROOT).variant(target, variant).trains:
        rows = re.findall(rf"^\|.*`{variant}`.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
        assert rows
        assert all("cannot train" in row for row in rows)
