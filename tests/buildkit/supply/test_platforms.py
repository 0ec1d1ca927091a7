"""Locks for another machine than this one."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from buildkit.cli import app
from buildkit.errors import LockError, UsageError
from buildkit.host.settings import read_host
from buildkit.images.plan import make_plan
from buildkit.recipe.lock_file import lock_path, read_lock
from buildkit.recipe.matrix import Base, Matrix, load_matrix
from buildkit.recipe.platform import AMD64, ARM64, choose_platform, host_platform
from buildkit.supply.resolve import plain_lock, write_lock
from tests.buildkit.conftest import PYPROJECT
from tests.buildkit.stand_ins import Index, StandIn, write_wheel
from tests.serving import serving


def test_names_and_locks_of_arm64_are_their_own(matrix: Matrix) -> None:
    plain, arm = (matrix.variant("cuda", platform=platform) for platform in (AMD64, ARM64))
    assert arm.name == f"{plain.name}-arm64"
    assert lock_path(matrix, arm) != lock_path(matrix, plain)
    assert matrix.variant("cuda", arm.name) == arm
    assert matrix.variant("cuda", f"{plain.name}-arm64-debug").name == f"{plain.name}-arm64-debug"
    assert (arm.status, arm.proof) == ("untested", ""), "what is proven holds for one platform"
    assert matrix.is_default(arm)


def test_debuggers_get_the_versions_of_their_own_platform(matrix: Matrix) -> None:
    for platform in (AMD64, ARM64):
        debug = matrix.variant("cuda", with_debug=True, platform=platform)
        assert plain_lock(matrix, debug) == read_lock(matrix, matrix.variant("cuda", platform=platform))


def test_a_lock_holds_the_wheels_of_its_platform(project: Path, tmp_path: Path) -> None:
    (project / "pyproject.toml").write_text(PYPROJECT.replace('"idna==3.10"', ""))
    matrix = load_matrix(project)
    base = Base("b", f"debian@sha256:{'1' * 64}", "3.11", "2.36")
    variant = replace(matrix.variant("cpu", platform=ARM64), base=base, requirements=("thing==1.0",))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(StandIn("thing", "1.0", "cp311-cp311-manylinux_2_28_x86_64", ("missing-on-arm64",)), wheels)
    write_wheel(StandIn("thing", "1.0", "cp311-cp311-manylinux_2_28_aarch64", (), ("thing/libnccl.so.2",)), wheels)
    with serving(Index(wheels)) as index:
        write_lock(matrix, variant, replace(read_host({}), default_index=index.address), tmp_path / "cache")
        assert lock_path(matrix, variant).name == "small-arm64.txt"
        assert read_lock(matrix, variant).wheels["thing"].libraries == ("libnccl.so.2",)
        elsewhere = replace(matrix.variant("cpu", platform=AMD64), base=base, requirements=("thing==1.0",))
        lock_path(matrix, variant).rename(lock_path(matrix, elsewhere))
        with pytest.raises(LockError, match="does not match"):
            read_lock(matrix, elsewhere)


def test_the_committed_lock_for_arm64_fits_together(matrix: Matrix, tmp_path: Path) -> None:
    variant = matrix.variant("cuda", platform=ARM64)
    plan = make_plan(matrix, variant, read_lock(matrix, variant), tmp_path)
    assert [check for check in plan.checks if check.status != "ok"] == []


@pytest.mark.skipif(host_platform() != AMD64, reason="this host is of the other platform")
def test_an_image_for_another_platform_is_not_built_here(project: Path) -> None:
    words = ["build", "--target", "cpu", "--platform", "linux/arm64", "--project", str(project)]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == "cpu-small-arm64 is for linux/arm64, and this host is linux/amd64"


def test_an_unknown_platform_is_refused() -> None:
    with pytest.raises(UsageError, match="--platform linux/riscv64: unknown platform"):
        choose_platform("linux/riscv64")
