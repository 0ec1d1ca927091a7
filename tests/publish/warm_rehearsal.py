"""`buildkit warm` rehearsed on CPU: the real cpu image makes a cache, and a second start uses it.

Compiled kernels need a GPU, and training on CPU leaves nothing to pack. vLLM by itself keeps its facts about a model's
class, which it finds out in a process of its own. Needs the image and some minutes, so plain `pytest` does not collect
it: `pytest tests/publish/warm_rehearsal.py`.
"""

import os
import shlex
from pathlib import Path

import pytest

from buildkit.warming.archive import read_cache
from tests.publish.test_commands import buildkit

IMAGE = os.environ.get("SLIPWAY_TEST_IMAGE", "slipway:cpu")
LOOK = ("python3", "-c", "from vllm import ModelRegistry as r; r.models['Qwen2ForCausalLM'].inspect_model_cls()")
LISTED = "find /cache/inductor /cache/triton /cache/vllm -type f -printf '%P %i %T@\\n' | sort"
"""Every file with its inode and time: a compiler that misses its entry writes the file again."""


@pytest.mark.timeout(1800)
def test_a_start_with_the_warm_cache_writes_no_entry_again_on_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    archive = tmp_path / "cache.tar.zst"
    made = buildkit("warm", "--target", "cpu", "--image", IMAGE, "--output", str(archive), "--", "--", *LOOK)
    assert made.returncode == 0, made.stderr
    assert made.stdout == f"{archive}\n"
    cache = read_cache(archive)
    assert (cache.key.devices, cache.key.driver) == ((), "")

    script = f"{LISTED} > /job/before\n{shlex.join(LOOK)}\n{LISTED} > /job/after"
    for folder in ("job", "cache"):
        (tmp_path / folder).mkdir()
    volumes = ("-v", f"{tmp_path}/job:/job", "-v", f"{tmp_path}/cache:/cache", "-e", "SLIPWAY_CACHE_DIR=/cache")
    used = buildkit(
        "run", "--target", "cpu", "--image", IMAGE, "--warm", str(archive), *volumes, "--", "--", "sh", "-ec", script
    )
    assert used.returncode == 0, used.stderr
    assert f"compiled code from /opt/slipway/warm: {cache.files} new files in /cache/inductor" in used.stderr
    before, after = ((tmp_path / "job" / name).read_text() for name in ("before", "after"))
    assert len(before.splitlines()) == cache.files
    assert after == before
