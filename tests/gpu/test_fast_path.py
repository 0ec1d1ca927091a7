"""The decode fast path on a GPU, where vLLM schedules ahead and has another model runner than on CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.conftest import REHEARSAL
from tests.gpu.whole_runs import Record

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_responses_and_log_probs_are_those_of_vllms_own_accounting(tmp_path: Path, record_property: Record) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu.accounting", "--shape", "tiny", "--response", "300"]
    options = ["--responses", "8", "32", "--kv-cache-gib", "1", "--jobs", str(tmp_path), "--out", str(rows)]
    subprocess.run([*command, *options, *(["--cpu"] if REHEARSAL else [])], cwd=REPOSITORY, check=True)
    results = [json.loads(line) for line in rows.read_text().splitlines()]
    record_property("seconds with the fast path, and without", [row["all_seconds"] for row in results])
    assert [(row["responses"], row["same"]) for row in results] == [(8, True), (8, True), (32, True), (32, True)]
    assert min(row["steady_steps"] for row in results) > 500
