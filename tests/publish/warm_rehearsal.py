"""`buildkit warm` rehearsed on CPU: the real cpu image makes a cache, and a second start uses it.

On CPU vLLM keeps its facts about a model, which it otherwise finds out in a process of its own; compiled kernels need a
GPU. Needs the image and some minutes, so plain `pytest` does not collect it: `pytest tests/publish/warm_rehearsal.py`.
"""

import os
from pathlib import Path

import pytest

from buildkit.running.short_run import short_run
from buildkit.warming.archive import read_cache
from tests.publish.test_commands import buildkit

IMAGE = os.environ.get("SLIPWAY_TEST_IMAGE", "slipway:cpu")
LISTED = "find /cache/inductor /cache/triton /cache/vllm -type f -printf '%P %i %T@\\n' | sort"
"""Every file with its inode and time: a compiler that misses its entry writes the file again."""


@pytest.mark.timeout(1800)
def test_a_start_with_the_warm_cache_writes_no_entry_again_on_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    archive = tmp_path / "cache.tar.zst"
    made = buildkit("warm", "--target", "cpu", "--image", IMAGE, "--output", str(archive))
    assert made.returncode == 0, made.stderr
    assert made.stdout == f"{archive}\n"
    cache = read_cache(archive)
    assert (cache.key.devices, cache.key.driver) == ((), "")

    train = short_run("/job", 1, False, 900)[-1].replace("exec ", "")
    script = f"{LISTED} > /job/before\n{train}\n{LISTED} > /job/after"
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
