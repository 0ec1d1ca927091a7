"""A cache directory as a run leaves it: compiled code, and beside it what others must not get."""

from pathlib import Path

import pytest

from buildkit.warming.archive import pack
from buildkit.warming.cache import Key, WarmCache

LOCK = "sha256:" + "a" * 64
H200 = Key(LOCK, ("NVIDIA H200",), "580.65.06")
EMPTY = WarmCache(H200, "cuda", "small", 0, 0)

COMPILED = {
    "inductor/fxgraph/aa/entry": b"graph",
    "inductor/ab/cab.py": b"def call(): ...",
    "triton/KEY/__grp__kernel.json": b'{"child_paths": {"kernel.cubin": "/tmp/slipway-0/triton/KEY/kernel.cubin"}}',
    "triton/KEY/kernel.cubin": b"\x7fELF",
    "vllm/modelinfos/qwen2.json": b"{}",
    "vllm/torch_compile_cache/key/rank_0_0/backbone/artifact": b"code",
}
OTHERS = {
    "home/.netrc": b"password",
    "huggingface/hub/models/weights": b"weights",
    "huggingface/token": b"hf_secret",
    "inductor/locks/cab.lock": b"",
    "matplotlib/fontlist.json": b"{}",
    "triton/KEY/tmp.pid_7/kernel.cubin": b"half",
    "vllm/assets/image.png": b"data",
    "vllm/gpu_p2p_access_cache_for_0,1.json": b"{}",
    "vllm/torch_compile_cache/key/rank_0_0/backbone/cache_key_factors.json": b'{"env": {}}',
    "xdg/anything": b"data",
}


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The cache directory after the run."""
    return write_files(tmp_path / "left", COMPILED | OTHERS)


@pytest.fixture
def archive(left: Path, tmp_path: Path) -> Path:
    path = tmp_path / "cache.tar.zst"
    pack(left, EMPTY, path)
    return path
