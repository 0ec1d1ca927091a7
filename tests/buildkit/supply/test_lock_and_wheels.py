import hashlib
import io
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.errors import LockError, RegistryError
from buildkit.host.settings import HostSettings, read_host
from buildkit.recipe.lock import Pin, parse_lock, parse_pins
from buildkit.recipe.lock_file import lock_path, read_lock
from buildkit.recipe.matrix import Matrix, load_matrix
from buildkit.recipe.platform import AMD64
from buildkit.supply.resolve import resolve, write_lock
from buildkit.supply.wheels import local_wheels


def host_with(find_links: tuple[str, ...] = (), indexes: tuple[str, ...] = ()) -> HostSettings:
    return HostSettings(None, indexes, find_links, (), None, {}, "")


def test_committed_locks_match_the_matrix(matrix: Matrix) -> None:
    for target in ("cpu", "cuda"):
        for variant in matrix.targets[target].variants.values():
            assert all(pin.hashes for pin in read_lock(matrix, variant).pins)


def test_every_image_can_encrypt_the_traffic_between_nodes(matrix: Matrix) -> None:
    for path in (matrix.images / "locks").rglob("*.txt"):
        assert "cryptography" in parse_lock(path.read_text()).versions, path


def test_committed_locks_contain_no_address(matrix: Matrix) -> None:
    for path in (matrix.images / "locks").rglob("*.txt"):
        text = path.read_text()
        for sign in ("://", "--index-url", "--find-links", " @ "):
            assert sign not in text, path


def test_image_for_mixtures_of_experts_locks_what_the_default_leaves_out(matrix: Matrix) -> None:
    names = ("vllm0.32-torch2.13-cu130", "vllm0.32-torch2.13-cu130-moe")
    default, moe = (matrix.variant("cuda", name, platform=AMD64) for name in names)
    assert moe.requirements == default.requirements
    kept = set(default.exclude) - set(moe.exclude)
    assert kept == {
        "nccl-extensions",
        "nvidia-cutlass-dsl",
        "nvidia-cutlass-dsl-libs-base",
        "nvidia-cutlass-dsl-libs-cu13",
    }
    assert kept <= read_lock(matrix, moe).versions.keys()
    assert "flashinfer/moe_ep" in set(default.source_only) - set(moe.source_only)


def test_excluded_distributions_are_not_locked(matrix: Matrix) -> None:
    variant = matrix.variant("cpu")
    assert variant.exclude
    assert not set(variant.exclude) & read_lock(matrix, variant).versions.keys()


def test_lock_resolves_and_goes_stale_when_the_pins_change(project: Path, tmp_path: Path) -> None:
    path = project / "images" / "matrix.toml"
    pinned = re.sub(r"(?m)^bootstrap.*$", "", path.read_text()).replace("-slim", f"-slim@sha256:{'1' * 64}")
    path.write_text(pinned)
    matrix = load_matrix(project)
    variant = matrix.variant("cpu")
    write_lock(matrix, variant, read_host(), tmp_path)
    lock = read_lock(matrix, variant)
    assert lock.versions == {"idna": "3.10", "six": "1.17.0"}
    assert [len(pin.hashes) for pin in lock.pins] == [1, 1]  # PyPI has a wheel and a source archive of each
    assert lock.base_reference == f"debian:bookworm-slim@sha256:{'1' * 64}"
    six = lock.wheels["six"]
    assert 30_000 < six.python_bytes < six.bytes < 60_000
    path.write_text(path.read_text().replace("six==1.17.0", "six==1.16.0"))
    matrix = load_matrix(project)
    with pytest.raises(LockError) as caught:
        read_lock(matrix, matrix.variant("cpu"))
    assert "buildkit lock --target cpu" in caught.value.hint


def test_a_base_without_registry_or_bootstrap_leaves_the_old_lock(project: Path) -> None:
    path = project / "images" / "matrix.toml"
    text = re.sub(r"(?m)^bootstrap.*$", "", path.read_text())
    path.write_text(text.replace("debian:bookworm-slim", "127.0.0.1:1/base:latest"))
    matrix = load_matrix(project)
    lock = lock_path(matrix, matrix.variant("cpu"))
    lock.parent.mkdir(parents=True)
    lock.write_text("# as it was\n")
    with pytest.raises(RegistryError, match=r"127\.0\.0\.1:1 did not answer"):
        write_lock(matrix, matrix.variant("cpu"), read_host(), lock.parent)
    assert lock.read_text() == "# as it was\n"


def test_a_failed_resolution_leaves_the_old_lock(project: Path) -> None:
    path = project / "images" / "matrix.toml"
    path.write_text(path.read_text().replace("six==1.17.0", "six==99.0"))
    matrix = load_matrix(project)
    lock = lock_path(matrix, matrix.variant("cpu"))
    lock.parent.mkdir(parents=True)
    lock.write_text("# as it was\n")
    with pytest.raises(LockError) as caught:
        write_lock(matrix, matrix.variant("cpu"), read_host(), lock.parent)
    assert "six" in str(caught.value)
    assert lock.read_text() == "# as it was\n"
    assert list(lock.parent.iterdir()) == [lock]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "files" / "some_thing-1.0-py3-none-any.whl"
    path.parent.mkdir()
    path.write_bytes(b"wheel")
    return path


def lock_of(wheel: Path) -> tuple[Pin, ...]:
    return parse_pins(f"some-thing==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")


def test_wheels_in_folders_are_taken_by_digest(wheel: Path) -> None:
    host = host_with(find_links=(str(wheel.parent),))
    assert local_wheels(lock_of(wheel), host) == [wheel]
    assert local_wheels(parse_pins(f"some-thing==1.0 --hash=sha256:{'0' * 64}\n"), host) == []


def test_wheels_in_local_indexes_are_taken_by_digest(wheel: Path, tmp_path: Path) -> None:
    page = tmp_path / "simple" / "some-thing" / "index.html"
    page.parent.mkdir(parents=True)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    page.write_text(f'<a href="../../files/{wheel.name}#sha256={digest}">{wheel.name}</a>')
    host = host_with(indexes=(f"file://{tmp_path}/simple",))
    assert local_wheels(lock_of(wheel), host) == [wheel]


def test_a_mirror_that_hides_a_wheel_does_not_make_us_build_a_source_archive(project: Path, tmp_path: Path) -> None:
    source = io.BytesIO()
    with tarfile.open(fileobj=source, mode="w:gz") as archive:
        for name, text in {
            "onlysource-1.0/PKG-INFO": "Metadata-Version: 2.1\nName: onlysource\nVersion: 1.0\n",
            "onlysource-1.0/setup.py": f"open({str(tmp_path / 'ran')!r}, 'w')\n",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    links = tmp_path / "links"
    links.mkdir()
    (links / "onlysource-1.0.tar.gz").write_bytes(source.getvalue())
    matrix = load_matrix(project)
    variant = replace(matrix.variant("cpu"), requirements=("onlysource==1.0",))
    with pytest.raises(LockError, match="onlysource"):
        resolve(matrix, variant, host_with((str(links),)), "")
    assert not (tmp_path / "ran").exists()
