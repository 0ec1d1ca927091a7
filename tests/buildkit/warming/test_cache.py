"""What a warm cache fits: lock, GPUs and driver, each refused with its reason."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buildkit.errors import WarmCacheError
from buildkit.host.machine import read_machine
from buildkit.warming.cache import (
    Key,
    WarmCache,
    as_json,
    key_here,
    read_json,
    refuse_other_lock,
    refuse_other_machine,
)
from tests.buildkit.hosts import BARE, DGX, MI300X
from tests.buildkit.warming.conftest import H200, LOCK

CACHE = WarmCache(H200, "cuda", "small", 6, 100)


def test_the_manifest_is_read_as_it_was_written() -> None:
    assert read_json(as_json(CACHE)) == CACHE


@pytest.mark.parametrize(
    "changes",
    [{"schema": 2}, {"key": {}}, {"files": -1}, {"bytes": "4"}, {"files": True}, {"target": 1}, {"key": None}],
)
def test_a_wrong_manifest_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WarmCacheError):
        read_json(json.dumps(json.loads(as_json(CACHE)) | changes).encode())


def test_the_key_is_read_from_the_machine(tmp_path: Path) -> None:
    keys = {
        target: key_here(LOCK, target, read_machine(host.write(tmp_path / target)))
        for target, host in {"cuda": DGX, "rocm": MI300X, "cpu": BARE}.items()
    }
    assert keys == {
        "cuda": Key(LOCK, ("NVIDIA H100 80GB HBM3",), "580.95.05"),
        "rocm": Key(LOCK, ("gfx942",), "6.12.12"),
        "cpu": Key(LOCK, (), ""),
    }


def test_the_name_tells_the_key() -> None:
    assert CACHE.name == "warm-cuda-aaaaaaaaaaaa-nvidia-h200-580.65.06"
    assert replace(CACHE, key=Key(LOCK, (), ""), target="cpu").name == "warm-cpu-aaaaaaaaaaaa"


def test_a_cache_of_this_image_and_machine_fits() -> None:
    refuse_other_lock(CACHE, LOCK)
    refuse_other_machine(CACHE, H200)


def test_a_cache_of_another_lock_is_refused() -> None:
    with pytest.raises(WarmCacheError, match="with lock aaaaaaaaaaaa, and the image has lock bbbbbbbbbbbb"):
        refuse_other_lock(CACHE, "sha256:" + "b" * 64)


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (replace(H200, devices=("NVIDIA H100 80GB HBM3",)), "on NVIDIA H200, and this machine has NVIDIA H100 80GB"),
        (replace(H200, devices=("NVIDIA A100", "NVIDIA H200")), "this machine has NVIDIA A100 and NVIDIA H200"),
        (replace(H200, driver="590.1"), r"with driver 580\.65\.06, and this machine has 590\.1"),
        (replace(H200, devices=(), driver=""), "and this machine has none"),
    ],
)
def test_a_cache_of_another_machine_is_refused(here: Key, reason: str) -> None:
    with pytest.raises(WarmCacheError, match=reason):
        refuse_other_machine(CACHE, here)
