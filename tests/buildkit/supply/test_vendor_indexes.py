"""A variant without a lock is resolved from its vendor's index. Here the index serves stand-ins of the wheels."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from buildkit.cli import app
from buildkit.errors import LockError, MatrixError, UsageError
from buildkit.host.settings import HostSettings, read_host, read_mirrors
from buildkit.images.context import stage
from buildkit.images.plan import make_plan
from buildkit.images.secrets import write_secrets
from buildkit.recipe import lock_file
from buildkit.recipe.lock_file import lock_path, read_lock
from buildkit.recipe.matrix import Base, Matrix, Variant, VendorIndex, load_matrix
from buildkit.supply.resolve import lock_for_build
from buildkit.supply.vendor_indexes import with_vendor_indexes
from tests.buildkit.conftest import PYPROJECT, ROOT
from tests.buildkit.stand_ins import (
    INDEX,
    TORCH,
    VERSIONS,
    WHEELS,
    Index,
    StandIn,
    write_wheel,
    write_wheels,
)
from tests.serving import serving

DIGEST = f"sha256:{'1' * 64}"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    write_wheels(tmp_path / "wheels")
    with serving(Index(tmp_path / "wheels")) as index:
        yield index


@pytest.fixture
def checkout(tmp_path: Path) -> Matrix:
    """The project's own matrix and templates, without locks and with a base whose digest is known."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "images", root / "images", ignore=shutil.ignore_patterns("locks"))
    (root / "pyproject.toml").write_text(PYPROJECT.replace('"idna==3.10"', ""))
    for package in ("entrypoints", "trainer"):
        (root / package).mkdir()
    return load_matrix(root)


@pytest.fixture
def variant(checkout: Matrix) -> Variant:
    """The default ROCm variant, with vLLM's wheels alone."""
    variant = checkout.variant("rocm")
    base = Base("rocm", f"rocm/dev@{DIGEST}", variant.base.python, variant.base.glibc)
    return replace(variant, base=base, requirements=variant.requirements[:1], exclude={"transformers": "large"})


def mirrored(index: Index) -> HostSettings:
    """A host on which only the vendor's index answers, through its mirror."""
    return replace(read_host({}), default_index=f"{index.address}/none", mirrors={INDEX: index.address})


def test_stand_in_rocm_wheels_are_locked_planned_and_staged(
    checkout: Matrix, variant: Variant, index: Index, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = mirrored(index)
    caplog.set_level("INFO")
    lock = lock_for_build(checkout, variant, host, tmp_path / "cache", locked=False)
    assert "has no lock yet; resolving it first" in caplog.text
    assert lock_path(checkout, variant).is_relative_to(checkout.root)
    assert lock.versions == VERSIONS
    assert {name: wheel.glibc for name, wheel in lock.wheels.items()} == {
        "vllm": "2.39", "torch": "2.39", "triton": "2.35", "amd-aiter": "2.39", "flash-attn": "2.39", "amdsmi": "",
    }  # fmt: skip

    asked = len(index.asked)
    assert lock_for_build(checkout, variant, host, tmp_path / "cache", locked=True) == lock
    assert len(index.asked) == asked, "a lock that is there is taken as it is"

    plan = make_plan(checkout, variant, lock, tmp_path / "cache")
    assert [check for check in plan.checks if check.status != "ok"] == []

    host, context = with_vendor_indexes(host, variant), tmp_path / "context"
    stage(context, checkout, variant, lock, "registry", host)
    assert TORCH in (context / "requirements" / "torch.txt").read_text()
    secrets = write_secrets(tmp_path, variant.base, host)
    assert index.address in secrets["host_environment"].read_text()
    public = [lock_path(checkout, variant), *(path for path in context.rglob("*") if path.parent.name != "tools")]
    named = [path for path in public if path.is_file() and b"wheels.vllm.ai" in path.read_bytes()]
    assert named == []
    assert [path for path in public if path.is_file() and index.address.encode() in path.read_bytes()] == []


def test_a_base_that_is_too_old_for_the_wheels_is_named_with_what_it_lacks(
    checkout: Matrix, variant: Variant, index: Index, tmp_path: Path
) -> None:
    variant = replace(variant, base=replace(variant.base, name="debian12", glibc="2.36"))
    with pytest.raises(LockError, match=r"debian12 has glibc 2\.36, vllm 0\.31\.0\+rocm723 needs 2\.39") as caught:
        lock_for_build(checkout, variant, mirrored(index), tmp_path / "cache", locked=False)
    assert "name a newer `base`" in caught.value.hint
    assert not lock_path(checkout, variant).exists()


def test_locked_refuses_a_variant_without_a_lock(project: Path) -> None:
    done = CliRunner().invoke(app, ["build", "--target", "cpu", "--locked", "--project", str(project)])
    assert isinstance(done.exception, LockError)
    assert str(done.exception) == "images/locks/cpu/small.txt: no lock for cpu-small"
    assert done.exception.hint == "run `buildkit lock --target cpu --variant small`"
    assert not (project / "images" / "locks").exists()


def test_without_the_index_nothing_is_written_and_the_next_command_is_named(
    checkout: Matrix,
    variant: Variant,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    mirrors = {"https://wheels.vllm.ai": "http://user:secret@127.0.0.1:9"}
    host = replace(read_host({}), default_index="http://127.0.0.1:9", mirrors=mirrors)
    with pytest.raises(LockError) as caught:
        lock_for_build(checkout, variant, host, tmp_path / "cache", locked=False)
    assert "http://127.0.0.1:9/rocm/0.31.0/rocm723 does not answer" in caplog.text
    assert "reach http://127.0.0.1:9/rocm/0.31.0/rocm723, or name a mirror" in caught.value.hint
    assert "buildkit lock --target rocm --variant rocm7.2-wheels" in caught.value.hint
    assert "secret" not in caplog.text + str(caught.value) + caught.value.hint
    assert not list((checkout.images).rglob("locks/*"))


def test_an_installed_package_keeps_new_locks_in_the_users_folder(
    checkout: Matrix, variant: Variant, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_file, "INSTALLED", checkout.root)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    lock_for_build(checkout, variant, mirrored(index), tmp_path / "cache", locked=False)
    written = tmp_path / "data" / "slipway" / "locks" / "rocm" / "rocm7.2-wheels.txt"
    assert lock_path(checkout, variant) == written
    assert written.is_file()
    assert not (checkout.images / "locks").exists()
    written.write_text("# inputs: sha256:0\nvllm==1\n")
    with pytest.raises(LockError, match=str(written)):
        read_lock(checkout, variant)


def test_no_lock_names_a_vendors_index(matrix: Matrix) -> None:
    variants = [variant for target in matrix.targets.values() for variant in target.variants.values()]
    addresses = {address.split("/")[2] for variant in variants for address in variant.indexes}
    assert addresses
    locks = [path.read_text() for path in (matrix.images / "locks").rglob("*.txt")]
    assert [address for address in addresses for lock in locks if address in lock] == []


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("http://wheels.example", 'purpose = "torch"'),
        ("https://user:secret@wheels.example", 'purpose = "torch"'),
        ("https://wheels.example", 'only = ["torch"]'),
    ],
)
def test_only_public_indexes_with_a_purpose_are_accepted(project: Path, address: str, text: str) -> None:
    with (project / "images" / "matrix.toml").open("a") as file:
        file.write(f'[targets.cpu.variants.small.indexes."{address}"]\n{text}\n')
    with pytest.raises(MatrixError, match=r"indexes") as caught:
        load_matrix(project)
    assert "secret" not in str(caught.value)


def test_an_index_for_one_distribution_serves_nothing_else(
    checkout: Matrix, variant: Variant, index: Index, tmp_path: Path
) -> None:
    """PyTorch's index holds copies of other packages, which are older than PyPI's."""
    shutil.copytree(tmp_path / "wheels", tmp_path / "other")
    for version, folder in (("2.0", "wheels"), ("3.10", "other")):
        write_wheel(StandIn("idna", version, "py3-none-any"), tmp_path / folder)
    (tmp_path / "other" / next(wheel.filename for wheel in WHEELS if wheel.name == "torch")).unlink()
    variant = replace(
        variant,
        requirements=(TORCH, "idna"),
        indexes={INDEX: VendorIndex("torch", only=("torch",))},
    )
    with serving(Index(tmp_path / "other")) as other:
        host = replace(mirrored(index), default_index=other.address)
        lock = lock_for_build(checkout, variant, host, tmp_path / "cache", locked=False)
    assert lock.versions == {"idna": "3.10", "torch": VERSIONS["torch"], "triton": VERSIONS["triton"]}


def test_the_longest_mirrored_address_wins() -> None:
    mirrors = read_mirrors("https://a.example=http://one/ https://a.example/b=http://two")
    host = replace(read_host({}), mirrors=mirrors)
    assert host.mirrored("https://a.example/b/c") == "http://two/c"
    assert host.mirrored("https://a.example/bc") == "http://one/bc"
    assert host.mirrored("https://other.example/b") == "https://other.example/b"


@pytest.mark.parametrize("text", ["https://a.example", "a.example=http://b", "https://a.example=/folder"])
def test_a_malformed_mirror_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not ADDRESS=MIRROR"):
        read_mirrors(text)
