"""A disk that is full, for each writer of checkpoints and models: a small tmpfs in a mount namespace of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.runs.checkpoints import full_disk_program
from trainer.models.small import build_tokenizer, save_model

SIZE = "300k"  # a model takes 5 MB
WRITERS = ("checkpoint", "model", "final model", "export", "adapter", "warm start")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each writer said, by name."""
    directory = tmp_path_factory.mktemp("disk")
    source, disk = directory / "source", directory / "full"
    disk.mkdir()
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": len(tokenizer)}
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model("qwen2", num_attention_heads=2, num_key_value_heads=1, **size, **tokens)
    save_model(AutoModelForCausalLM.from_config(config), tokenizer, source)
    become_root = () if os.geteuid() == 0 else ("--map-root-user",)
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    # In a chroot `/` is no mount point, and its propagation cannot be changed.
    propagation = () if any(line.split()[4] == "/" for line in mounts) else ("--propagation", "unchanged")
    mount = f'mount -t tmpfs -o size={SIZE} none "{disk}" && exec "$@"'
    command = ["unshare", *become_root, *propagation, "--mount", "sh", "-c", mount, "_"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mount namespace")
    program = [sys.executable, full_disk_program.__file__, str(source), str(disk)]
    done = subprocess.run([*command, *program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_with_the_path_and_what_is_missing(
    writer: str, reports: dict[str, dict[str, Any]]
) -> None:
    report = reports[writer]
    assert report["error"] == "CheckpointError", report
    assert re.fullmatch(
        r"/\S+/full/\S+: cannot be written: No space left on device, [\d.]+ MiB are free, about [\d.]+ MiB are missing",
        report["message"],
    )
    assert ".partial" not in report["message"]
    assert "free space" in report["hint"]


def test_nothing_incomplete_stays(reports: dict[str, dict[str, Any]]) -> None:
    assert json.loads(reports["left"]["message"]) in ([], ["run"])
