from pathlib import Path

import pytest

from buildkit.errors import MatrixError, UsageError
from buildkit.recipe.dockerfile import render_dockerfile
from buildkit.recipe.matrix import TOOLKIT, Matrix, load_matrix
from buildkit.recipe.project import find_project


def test_every_pin_is_exact_or_bounded(matrix: Matrix) -> None:
    for target in matrix.targets.values():
        for variant in target.variants.values():
            pins = [text for text in variant.requirements if not text.startswith(TOOLKIT)]  # torch pins its release
            assert all("=" in pin for pin in pins), variant.identifier


def test_the_cuda_images_alone_compile_cuda(matrix: Matrix) -> None:
    for target in matrix.targets.values():
        for variant in target.variants.values():
            assert variant.compiles_cuda == (target.name == "cuda"), variant.identifier
            text = render_dockerfile(matrix, variant, variant.base.providers[-1], {})
            assert ("/usr/local/cuda/bin" in text) == variant.compiles_cuda


def test_proven_variants_say_where_and_when(matrix: Matrix) -> None:
    for target in matrix.targets.values():
        for variant in target.variants.values():
            assert (variant.status == "proven") == bool(variant.proof), variant.identifier


def test_unknown_target_names_the_nearest(matrix: Matrix) -> None:
    with pytest.raises(UsageError) as caught:
        matrix.variant("cud")
    assert "did you mean `cuda`?" in caught.value.hint


def test_unknown_variant_lists_the_known(matrix: Matrix) -> None:
    with pytest.raises(UsageError) as caught:
        matrix.variant("cpu", "xyz")
    assert matrix.targets["cpu"].default.name in caught.value.hint


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("schema = 1", "schema = 2", "`schema` is 2"),
        ('status = "untested"', 'status = "fine"', "`status` is 'fine'"),
        ('base = "debian12"\n', 'base = "debian99"\n', "`base` is 'debian99'"),
        ('base = "debian12"\n', 'base = "debian12"\ncolour = "red"\n', "colour"),
        ("disk_gib = 1\n", "", "disk_gib"),
        ("schema = 1", "schema = ", "at line 2"),
        ("[targets.cpu.variants.small]", "[targets.cpu.variant.small]", "variants"),
    ],
)
def test_malformed_matrix_names_the_place(project: Path, before: str, after: str, words: str) -> None:
    path = project / "images" / "matrix.toml"
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(MatrixError) as caught:
        load_matrix(project)
    assert words in str(caught.value)
    assert "matrix.toml" in str(caught.value)


LEFT_OUT = """
[source_only]
"large/tests" = "tests"
"large/experts" = "mixtures of experts"
[targets.cpu.exclude]
"large" = "480 MB"
"other" = "300 MB"
[targets.cpu.prune]
"large/lib" = "a second copy"
"other/lib" = "a second copy"
"""


def write_keep(project: Path, *names: str) -> None:
    path = project / "images" / "matrix.toml"
    keep = "".join(f'"{name}" = "needed here"\n' for name in names)
    path.write_text(f"{path.read_text()}\n[targets.cpu.variants.small.keep]\n{keep}{LEFT_OUT}")


def test_variant_keeps_what_its_target_leaves_out(project: Path) -> None:
    write_keep(project, "large", "large/lib", "large/experts")
    variant = load_matrix(project).variant("cpu", "small")
    assert list(variant.exclude) == ["other"]
    assert list(variant.prune) == ["other/lib"]
    assert list(variant.source_only) == ["large/tests"]


def test_keep_that_names_nothing_left_out_is_refused(project: Path) -> None:
    write_keep(project, "large", "larger")
    with pytest.raises(MatrixError, match=r"variants\.small\.keep: nothing leaves out `larger`"):
        load_matrix(project)


def test_the_root_is_found_from_a_subdirectory(project: Path) -> None:
    below = project / "images" / "env"
    assert find_project(None, below) == project == find_project(below, Path.cwd())


def test_no_root_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(MatrixError) as caught:
        find_project(tmp_path, Path.cwd())
    assert "--project" in caught.value.hint
