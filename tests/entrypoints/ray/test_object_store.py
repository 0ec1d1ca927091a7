from pathlib import Path

import pytest

from entrypoints.host.accelerators import count_gpus
from entrypoints.host.tree import Tree
from entrypoints.job.hello import missing_gpus, usable_gpus
from entrypoints.ray import object_store as memory

GIB = 1024**3


@pytest.mark.parametrize(
    ("ram", "shared", "size", "reason"),
    [
        (100 * GIB, 100 * GIB, 30 * GIB, "30 % of 102400 MiB RAM"),
        (100 * GIB, 10 * GIB, 8 * GIB, "80 % of 10240 MiB /dev/shm"),
        (100 * GIB, 64 * 1024**2, memory.RAY_MINIMUM, "--shm-size"),
        (100 * GIB, 0, memory.RAY_MINIMUM, "--shm-size"),
    ],
)
def test_the_store_fits_into_shared_memory(
    monkeypatch: pytest.MonkeyPatch, ram: int, shared: int, size: int, reason: str
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: ram)
    monkeypatch.setattr(memory, "free_shared_memory", lambda: shared)
    store = memory.choose_object_store(None)
    assert store.size == size
    assert reason in store.reason


def test_a_requested_size_is_used() -> None:
    assert memory.choose_object_store(GIB).size == GIB


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 0),
        ({"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""}, 2),
        (
            {f"sys/class/kfd/kfd/topology/nodes/{i}/gpu_id": gpu for i, gpu in enumerate(["0\n", "51140\n", "4711\n"])},
            2,
        ),
    ],
)
def test_counts_gpus(tmp_path: Path, files: dict[str, str], count: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="ascii")
    tree = Tree(tmp_path)
    assert count_gpus(tree) == usable_gpus(None, "cuda", {}, tree) == count
    assert usable_gpus(None, "cuda", {"CUDA_VISIBLE_DEVICES": "1"}, tree) == min(count, 1)
    assert usable_gpus(None, "cpu", {}, tree) == 0
    assert usable_gpus(5, "cuda", {}, tree) == 5
    for nothing in ("NoDevFiles", "-1", "none", "void", "", " "):
        assert usable_gpus(None, "cuda", {"CUDA_VISIBLE_DEVICES": nothing}, tree) == 0
    assert usable_gpus(None, "cuda", {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, tree) == min(count, 1)
    assert usable_gpus(None, "cuda", {"CUDA_VISIBLE_DEVICES": "GPU-8932f937, MIG-a1/1/0"}, tree) == min(count, 2)


def test_gpus_that_ray_does_not_see_are_named() -> None:
    assert missing_gpus({"a": 8, "b": 8}, {"a": 8, "b": 6}) == "Ray found 6 of 8 GPUs on b"
    assert missing_gpus({"a": 8, "b": 8}, {"x": 8, "y": 0}) == "Ray found 8 of 16 GPUs"
    assert missing_gpus({"a": 8, "b": 0}, {"a": 8, "b": 2}) == ""
