"""Compiled code that came with the image: copied where it fits the image and the node, else left with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoints.host.settings import examine_host
from entrypoints.host.starting_cache import use_starting_cache
from entrypoints.host.tree import Tree
from tests.entrypoints.hosts import HostTree

LOCK = "sha256:" + "a" * 64
KEY = {"lock": LOCK, "devices": ["NVIDIA H200"], "driver": "580.65.06"}
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27"
KERNEL = {"child_paths": {"k.json": "/tmp/slipway-0/triton/KEY/k.json", "k.cubin": "/tmp/slipway-0/triton/KEY/k.cubin"}}
FILES = {
    "inductor/ab/cab.py": "def call(): ...",
    "triton/KEY/__grp__k.json": json.dumps(KERNEL),
    "triton/KEY/k.cubin": "machine code",
    "vllm/modelinfos/qwen2.json": "{}",
}


def node(root: Path, key: Any = KEY, files: dict[str, str] = FILES, model: str = "NVIDIA H200") -> HostTree:
    """A node with a GPU and an image that brings compiled code with this key."""
    tree = HostTree(root)
    tree.image(target="cuda", lock=LOCK)
    tree.nvidia_gpu("pci0000:15/0000:15:01.0/0000:18:00.0", model)
    tree.write("proc/driver/nvidia/version", DRIVER)
    tree.write("opt/slipway/warm/warm.json", key if isinstance(key, str) else json.dumps({"schema": 1, "key": key}))
    for name, text in files.items():
        tree.write(f"opt/slipway/warm/{name}", text)
    return tree


def use(tree: HostTree, **environment: str) -> dict[str, str]:
    return use_starting_cache(Tree(tree.root), examine_host(Tree(tree.root), {}), environment)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_code_that_fits_is_copied_into_the_cache_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    caches = tmp_path / "caches"
    assert use(node(tmp_path / "node"), SLIPWAY_CACHE_DIR=str(caches)) == {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
    }
    assert names(caches) == set(FILES)
    assert "4 new files in" in caplog.text


def test_a_cache_that_the_user_placed_elsewhere_gets_its_part(tmp_path: Path) -> None:
    folders = use(
        node(tmp_path / "node"), SLIPWAY_CACHE_DIR=str(tmp_path / "caches"), TRITON_CACHE_DIR=str(tmp_path / "mine")
    )
    assert folders["TRITON_CACHE_DIR"] == str(tmp_path / "mine")
    assert names(tmp_path / "mine") == {"KEY/__grp__k.json", "KEY/k.cubin"}


def test_the_cache_is_the_jobs_own_and_what_it_has_already_stays(tmp_path: Path) -> None:
    tree, caches = node(tmp_path / "node"), tmp_path / "caches"
    (caches / "inductor" / "ab").mkdir(parents=True)
    (caches / "inductor" / "ab" / "cab.py").write_text("newer")
    use(tree, SLIPWAY_CACHE_DIR=str(caches))
    use(tree, SLIPWAY_CACHE_DIR=str(caches))
    assert (caches / "inductor" / "ab" / "cab.py").read_text() == "newer"
    assert names(caches) == set(FILES)
    assert names(tree.root / "opt/slipway/warm") == {*FILES, "warm.json"}


def test_tritons_kernels_are_found_where_they_lie_now(tmp_path: Path) -> None:
    use(node(tmp_path / "node"), SLIPWAY_CACHE_DIR=str(tmp_path / "caches"))
    folder = tmp_path / "caches" / "triton" / "KEY"
    paths = json.loads((folder / "__grp__k.json").read_text())["child_paths"]
    assert paths == {"k.json": str(folder / "k.json"), "k.cubin": str(folder / "k.cubin")}


def test_a_kernel_of_an_unknown_format_is_copied_as_it_is(tmp_path: Path) -> None:
    use(node(tmp_path / "node", files={"triton/KEY/__grp__k.json": "[1]"}), SLIPWAY_CACHE_DIR=str(tmp_path / "caches"))
    assert (tmp_path / "caches" / "triton" / "KEY" / "__grp__k.json").read_text() == "[1]\n"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (KEY | {"lock": "sha256:" + "b" * 64}, "made with lock sha256:bbb"),
        (KEY | {"devices": ["NVIDIA H100 80GB HBM3"]}, "made on NVIDIA H100 80GB HBM3, and this node has NVIDIA H200"),
        (KEY | {"devices": []}, "made on CPU, and this node has NVIDIA H200"),
        (KEY | {"driver": "590.1"}, "made with driver 590.1, and this node has 580.65.06"),
        ({}, "cannot be read"),
        ("no JSON", "cannot be read"),
        ("[]", "cannot be read"),
    ],
)
def test_code_that_does_not_fit_is_not_used_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: Any, reason: str
) -> None:
    assert use(node(tmp_path / "node", key), SLIPWAY_CACHE_DIR=str(tmp_path / "caches")) == {}
    assert f"is not used: it{'s warm.json' if 'read' in reason else ' was'} {reason}" in caplog.text
    assert not (tmp_path / "caches").exists()


def test_a_directory_that_cannot_be_written_costs_the_start_and_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert use(node(tmp_path / "node"), SLIPWAY_CACHE_DIR=str(tmp_path / "file" / "caches")) == {}
    assert "is not used: cannot create" in caplog.text


def test_the_cpu_image_needs_no_gpu_even_on_a_node_with_one(tmp_path: Path) -> None:
    tree = node(tmp_path / "node", {"lock": LOCK, "devices": [], "driver": ""})
    tree.image(target="cpu", lock=LOCK)
    assert use(tree, SLIPWAY_CACHE_DIR=str(tmp_path / "caches"))


def test_an_image_without_compiled_code_changes_nothing(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.image(target="cpu", lock=LOCK)
    assert use(tree) == {}
