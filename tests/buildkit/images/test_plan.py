"""Plans of the committed locks, and of locks with conflicting pins."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from buildkit.cli import app
from buildkit.errors import LockError, MatrixError
from buildkit.host.accelerators import same_cuda_major
from buildkit.images.plan import LastBuild, Plan, last_build, make_plan, record_build
from buildkit.recipe.lock import Deb, Lock, PackageChange, Pin, WheelFacts, format_lock, parse_lock
from buildkit.recipe.lock_file import lock_path, read_lock
from buildkit.recipe.matrix import Matrix, load_matrix

LOCKS = sorted((Path(__file__).parents[3] / "images" / "locks").glob("*/*.txt"))


def planned(matrix: Matrix, lock: Lock, cache: Path, target: str = "cuda") -> Plan:
    return make_plan(matrix, matrix.variant(target), lock, cache)


def status(plan: Plan, name: str) -> tuple[str, str]:
    (check,) = (check for check in plan.checks if check.name == name)
    return check.status, check.detail


def lock_with(*wheels: WheelFacts) -> Lock:
    pins = tuple(Pin(wheel.name, "1.0", frozenset(), f"{wheel.name}==1.0\n") for wheel in wheels)
    return Lock(wheels={wheel.name: wheel for wheel in wheels}, pins=pins)


def test_a_lock_is_read_as_it_was_written() -> None:
    wheel = WheelFacts(
        "torch",
        100,
        10,
        ("libnccl.so.2",),
        ("sm_80", "sm_90"),
        ">=3.10",
        ("sympy>=1.13; python_version > '3'",),
        "2.28",
    )
    pin = Pin("torch", "1.0", frozenset({"1" * 64}), f"torch==1.0 \\\n    --hash=sha256:{'1' * 64}\n")
    debs = (Deb("tini", "0.19-1", "ef"),)
    lock = Lock("01", "ab", 7, "debian:x", "sha256:cd", 5, debs, {"torch": wheel}, (pin,))
    text = format_lock(lock, "cpu-small")
    assert parse_lock(text) == lock
    assert parse_lock(text).text == text


@pytest.mark.parametrize("identifier", ["cpu", "cuda"])
def test_writing_a_committed_lock_reproduces_it(matrix: Matrix, identifier: str) -> None:
    variant = matrix.variant(identifier)
    lock = read_lock(matrix, variant)
    assert format_lock(lock, variant.identifier) == lock.text == lock_path(matrix, variant).read_text()


@pytest.mark.parametrize(
    "line", ["deb: tini", "epoch: 99999999999", "glibc: new ray", "requires-python: ray 3", "requires: ray torch=2"]
)
def test_a_malformed_lock_is_refused(line: str) -> None:
    with pytest.raises(LockError, match="malformed"):
        parse_lock(f"# wheel: ray 1 1\n# {line}\n")


@pytest.mark.parametrize(("target", "variant"), [(path.parent.name, path.stem) for path in LOCKS])
def test_committed_locks_fit_together(matrix: Matrix, tmp_path: Path, target: str, variant: str) -> None:
    chosen = matrix.variant(target, variant)
    plan = make_plan(matrix, chosen, read_lock(matrix, chosen), tmp_path)
    assert [check for check in plan.checks if check.status != "ok"] == []
    assert [layer.name for layer in plan.layers] == ["base", "accelerator", "torch", "python", "code"]
    assert plan.total_bytes == sum(layer.bytes for layer in plan.layers) > 10**9


def test_a_code_change_rebuilds_only_the_last_layer(matrix: Matrix, tmp_path: Path) -> None:
    lock = read_lock(matrix, matrix.variant("cpu"))
    before = planned(matrix, lock, tmp_path, "cpu")
    assert before.changed == ("base", "accelerator", "torch", "python", "code")
    record_build(before, lock, tmp_path)
    assert planned(matrix, lock, tmp_path, "cpu").changed == ()
    record_build(replace(before, layers=(*before.layers[:-1], replace(before.layers[-1], key="other"))), lock, tmp_path)
    assert planned(matrix, lock, tmp_path, "cpu").changed == ("code",)


@pytest.mark.parametrize("missing", ["entrypoints", "trainer", "images/chips.toml"])
def test_a_project_without_a_part_of_the_code_is_refused(project: Path, tmp_path: Path, missing: str) -> None:
    (project / "images" / "chips.toml").unlink()
    for name in {"entrypoints", "trainer", "images/chips.toml"} - {missing}:
        (project / name).symlink_to(Path(__file__).parents[3] / name)
    with pytest.raises(MatrixError, match=f"{project} has no {missing}, which"):
        planned(load_matrix(project), Lock(), tmp_path, "cpu")


def test_a_changed_pin_rebuilds_its_layer_and_those_above(matrix: Matrix, tmp_path: Path) -> None:
    lock = read_lock(matrix, matrix.variant("cpu"))
    record_build(planned(matrix, lock, tmp_path, "cpu"), lock, tmp_path)
    changed = parse_lock(lock.text.replace("\ntorch==", "\ntorch==9.", 1))
    assert planned(matrix, changed, tmp_path, "cpu").changed == ("torch", "python", "code")


@pytest.mark.parametrize(
    ("wheels", "check", "detail"),
    [
        (
            [WheelFacts(name, 1, 0, ("libnccl.so.2",)) for name in "ab"],
            "one NCCL or RCCL",
            "NCCL is in several wheels: a, b",
        ),
        (
            [WheelFacts(f"c{major}", 1, 0, (f"libcudart.so.{major}",)) for major in (12, 13)],
            "one CUDA major",
            "wheels of several CUDA majors: 12, 13",
        ),
        (
            [
                WheelFacts("vllm", 1, 0, requires=("torch==2.13.0", "opencv-python-headless>=4")),
                WheelFacts("torch", 1, 0),
            ],
            "dependencies",
            "vllm needs torch==2.13.0, locked: 1.0",
        ),
        ([WheelFacts("vllm", 1, 0, requires_python=">=3.12")], "python", "vllm needs Python >=3.12"),
        (
            [WheelFacts("vllm", 1, 0, glibc="2.39"), WheelFacts("torch", 1, 0, glibc="2.28")],
            "glibc",
            "vllm needs glibc 2.39, base debian12 has 2.36",
        ),
        (
            [WheelFacts("torch", 1, 0, architectures=("sm_80", "sm_90"))],
            "GPU architectures",
            "torch has no code for sm_100 (has sm_80, sm_90)",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_wheels_that_do_not_fit_are_named(
    matrix: Matrix, tmp_path: Path, wheels: list[WheelFacts], check: str, detail: str
) -> None:
    verdict, text = status(planned(matrix, lock_with(*wheels), tmp_path), check)
    assert (verdict, text) == ("fail", detail)


TOOLKIT = ("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-nvvm")


def toolkit(**versions: str) -> Lock:
    """A lock of CUDA 13.0's compiler and headers, with these versions instead."""
    pinned = dict.fromkeys(TOOLKIT, "13.0.88") | {name.replace("_", "-"): text for name, text in versions.items()}
    return Lock(pins=tuple(Pin(name, text, frozenset()) for name, text in pinned.items()))


@pytest.mark.parametrize(
    ("versions", "verdict", "detail"),
    [
        ({}, "ok", "compiler, headers and libraries of CUDA 13.0"),
        ({"nvidia_cuda_runtime": "13.0.96"}, "ok", "CUDA 13.0"),
        ({"nvidia_cuda_nvcc": "13.5.37"}, "fail", "nvidia-cuda-nvcc 13.5.37 is not of CUDA 13.0"),
        ({"nvidia_cuda_cccl": "13.3.5.0.6"}, "fail", "nvidia-cuda-cccl 13.3.5.0.6 is not of CUDA 13.0"),
        ({"nvidia_nvvm": "12.9.86"}, "fail", "nvidia-nvvm 12.9.86 is not of CUDA 13.0"),
        ({"nvidia_nvjitlink": "13.5.37"}, "ok", "CUDA 13.0"),
        ({"nvidia_nvjitlink": "12.9.86"}, "fail", "nvidia-nvjitlink 12.9.86"),
        ({"nvidia_nvjitlink": "14.0.1"}, "fail", "nvidia-nvjitlink 14.0.1"),
    ],
)
def test_parts_of_another_cuda_release_are_named(
    matrix: Matrix, tmp_path: Path, versions: dict[str, str], verdict: str, detail: str
) -> None:
    result, text = status(planned(matrix, toolkit(**versions), tmp_path), "CUDA toolkit")
    assert (result, detail in text) == (verdict, True), text


def test_a_cuda_image_without_compiler_says_what_is_off(matrix: Matrix, tmp_path: Path) -> None:
    lock = Lock(pins=(Pin("nvidia-cuda-runtime", "13.0.96", frozenset()),))
    verdict, text = status(planned(matrix, lock, tmp_path), "CUDA toolkit")
    assert verdict == "warn"
    assert "nvidia-cuda-nvcc" in text
    assert "FlashInfer" in text


def test_the_locked_glibc_counts_and_not_what_the_matrix_says_of_it(matrix: Matrix, tmp_path: Path) -> None:
    variant = matrix.variant("cuda")
    variant = replace(variant, base=replace(variant.base, glibc="2.39"))
    lock = replace(lock_with(WheelFacts("vllm", 1, 0, glibc="2.39")), debs=(Deb("libc6", "2.36-9+deb12u14", "00"),))
    verdict = status(make_plan(matrix, variant, lock, tmp_path), "glibc")
    assert verdict == (
        "fail",
        "vllm needs glibc 2.39, base debian12 has 2.36; images/matrix.toml says glibc 2.39, the locked base has 2.36",
    )


def test_a_record_that_cannot_be_read_is_no_build(matrix: Matrix, tmp_path: Path) -> None:
    variant, lock = matrix.variant("cpu"), Lock(changes=(PackageChange("tini", "1", "2"),))
    record_build(planned(matrix, lock, tmp_path, "cpu"), lock, tmp_path)
    assert last_build(variant, tmp_path).changes == ("tini 1 -> 2",)
    for content in ("", "[]", '{"layers": []}', '{"base": "00ff"}'):
        next((tmp_path / "builds").iterdir()).write_text(content)
        assert last_build(variant, tmp_path) == LastBuild()


@pytest.mark.parametrize(
    ("code", "device", "runs"), [("sm_80", "sm_86", True), ("sm_86", "sm_80", False), ("sm_80", "sm_90", False)]
)
def test_gpu_code_runs_on_later_devices_of_its_major_version(code: str, device: str, runs: bool) -> None:
    assert same_cuda_major(code, device) == runs


def test_plan_prints_one_document() -> None:
    done = CliRunner().invoke(app, ["plan", "--target", "cuda", "--json"])
    document = json.loads(done.stdout)
    assert {"name", "bytes", "key"} == set(document["layers"][0])
    assert document["total_bytes"] == sum(layer["bytes"] for layer in document["layers"])
