"""Whole runs on two Ray nodes with real engines: training, resuming, and ending early in the right way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from ray.cluster_utils import Cluster
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.checkpoint import read_checkpoint
from trainer.config import Config
from trainer.controller import run_directory, split, token_rewards
from trainer.data.arithmetic import write_arithmetic
from trainer.errors import ConfigError
from trainer.models import ModelShape, build_tokenizer, create_model, save_model

ROOT = Path(__file__).parents[2]
DEADLINE = 240.0


@dataclass
class Runs:
    """Starts `python -m trainer train` on a cluster of two nodes; every run has its own directory."""

    address: str
    directory: Path
    model: Path
    data: list[Path]

    def start(self, run_id: str, *overrides: str) -> "Run":
        settings = {
            "model.path": self.model,
            "data.train_files": self.data[0],
            "data.validation_files": self.data[1],
            "data.max_prompt_length": 128,
            "data.train_batch_size": 8,
            "rollout.samples_per_prompt": 2,
            "rollout.kv_cache_gib": 0.1,
            "actor.learning_rate": 3e-4,
            "critic.learning_rate": 1e-3,
            "actor.mini_batch_size": 8,
            "critic.mini_batch_size": 8,
            # A random model earns no reward: let entropy and KL give it something to learn from.
            "actor.entropy_coefficient": 0.1,
            "algorithm.kl_coefficient": 0.1,
            "trainer.output_dir": self.directory,
            "trainer.run_id": run_id,
            "trainer.test_freq": 2,
        }
        command = [sys.executable, "-m", "trainer", "train", *(f"{k}={v}" for k, v in settings.items()), *overrides]
        environment = {**os.environ, "RAY_ADDRESS": self.address}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        return Run(process, self.directory / run_id)


@dataclass
class Run:
    process: "subprocess.Popen[str]"
    directory: Path

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            if any(row["step"] >= step for row in self.metrics()):
                return
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.1)
        raise AssertionError(f"no step {step} within {DEADLINE} s")

    def end(self) -> tuple[int, str]:
        """Exit status and standard error."""
        _, errors = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, errors

    def metrics(self) -> list[dict[str, float]]:
        """The finished lines of metrics.jsonl."""
        file = self.directory / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def results(self, step: int) -> dict[str, float]:
        """A step's metrics that do not depend on the clock."""
        (row,) = (row for row in self.metrics() if row["step"] == step)
        return {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/", "wall_time"))}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    directory = tmp_path_factory.mktemp("runs")
    train, _, validation = write_arithmetic(directory / "data", 64, 8, max_number=9, dropped_carries=0.75, seed=0)
    tokenizer = build_tokenizer(["How many are 1 + 2? #### 3"])
    save_model(create_model(tokenizer, ModelShape(), seed=0), tokenizer, directory / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
            yield Runs(cluster.address, directory, directory / "model", [train, validation])
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs) -> Run:
    """Four steps on two ranks, with a checkpoint in the middle."""
    run = runs.start("uninterrupted", "trainer.total_steps=4", "trainer.save_freq=2")
    status, errors = run.end()
    assert status == 0, errors
    return run


def test_a_run_leaves_metrics_of_every_step(uninterrupted: Run) -> None:
    rows = uninterrupted.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "validation/exact_match" in row] == [0, 2, 4]
    for row in rows[1:]:
        assert row["rollout/log_prob_difference"] < 1e-3
        assert row["actor/gradient_norm"] > 0
        assert row["critic/value_loss"] >= 0
        assert 1 <= row["rollout/response_length"] <= 16
        assert row["time/step"] > row["time/update_actor"] > 0
    assert rows[1]["reference/kl"] == pytest.approx(0, abs=1e-6)
    assert abs(rows[4]["reference/kl"]) > 1e-6


def test_the_result_is_a_model_that_transformers_loads(uninterrupted: Run, runs: Runs) -> None:
    exported = uninterrupted.directory / "model"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("How many are 1 + 2?", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    before, after = load_file(runs.model / "model.safetensors"), load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_resumed_run_goes_on_with_the_same_metrics(uninterrupted: Run, runs: Runs) -> None:
    checkpoint = uninterrupted.directory / "checkpoints" / "step_000002"
    resumed = runs.start("resumed", "trainer.total_steps=1000", f"trainer.resume={checkpoint}", "trainer.save_freq=3")
    resumed.wait_for_step(4)
    assert [row["step"] for row in resumed.metrics()][:2] == [3, 4]
    for step in (3, 4):
        assert resumed.results(step) == uninterrupted.results(step)

    # The same run then loses a worker: it ends by itself, says which one, and its checkpoint is whole.
    host = next(p for p in psutil.process_iter(["cmdline"]) if is_worker_of(p, runs.address))
    host.kill()
    status, errors = resumed.end()
    assert status == 5
    assert "Traceback" not in errors
    assert any(f"error: {role} rank" in errors for role in ("actor", "critic", "reference", "rollout", "reward"))
    assert "died during" in errors
    assert read_checkpoint(resumed.directory / "checkpoints" / "step_000003", runs.model).step == 3


def is_worker_of(process: psutil.Process, address: str) -> bool:
    """Whether this is a trainer's worker on the cluster of this test; others may run on this machine."""
    try:
        raylet = process.parent()
        return (
            process.name().startswith("ray::WorkerHost")
            and raylet is not None
            and any(address in word for word in raylet.cmdline())
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def test_sigterm_saves_the_last_step_and_says_how_to_go_on(uninterrupted: Run, runs: Runs) -> None:
    """On one rank, from a checkpoint of two."""
    checkpoint = uninterrupted.directory / "checkpoints" / "step_000004"
    run = runs.start("stopped", "trainer.total_steps=1000", f"trainer.resume={checkpoint}", "trainer.nnodes=1")
    run.wait_for_step(5)
    run.process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    status, errors = run.end()
    assert status == 143
    assert time.monotonic() - started < 30
    (saved,) = (run.directory / "checkpoints").iterdir()
    assert f"continue with trainer.resume={saved}" in errors
    assert read_checkpoint(saved, runs.model).step == run.metrics()[-1]["step"]


def test_a_checkpoint_of_another_model_is_refused_at_once(uninterrupted: Run, runs: Runs, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(runs.model)
    save_model(create_model(tokenizer, ModelShape(), seed=1), tokenizer, tmp_path / "other")
    checkpoint = uninterrupted.directory / "checkpoints" / "step_000002"
    run = runs.start("refused", f"model.path={tmp_path / 'other'}", f"trainer.resume={checkpoint}")
    status, errors = run.end()
    assert status == 4
    assert "belongs to another model" in errors
    assert not run.directory.exists()


def test_the_score_is_given_at_the_last_token() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    kl = torch.full((3, 3), 0.5)
    rewards = token_rewards(torch.tensor([1.0, 0.0, 2.0]), kl, mask, kl_coefficient=0.1)
    expected = [[-0.05, 0.95, 0.0], [-0.05, -0.05, -0.05], [1.95, 0.0, 0.0]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


@pytest.mark.parametrize(("items", "count"), [(7, 3), (2, 4), (0, 2), (8, 2)])
def test_split_keeps_everything_in_order(items: int, count: int) -> None:
    parts = split(range(items), count)
    assert [item for part in parts for item in part] == list(range(items))
    assert len(parts) == count
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_resumed_run_goes_on_in_its_own_directory(tmp_path: Path) -> None:
    checkpoint = tmp_path / "runs" / "first" / "checkpoints" / "step_000002"
    assert run_directory(Config.model_validate({"trainer": {"resume": checkpoint}})) == tmp_path / "runs" / "first"
    settings = {"resume": checkpoint, "run_id": "second", "output_dir": tmp_path}
    assert run_directory(Config.model_validate({"trainer": settings})) == tmp_path / "second"


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_batches_that_do_not_divide_are_refused_before_anything_starts(role: str) -> None:
    with pytest.raises(ValueError, match=rf"{role}\.mini_batch_size=100 does not divide the 256 responses"):
        Config.model_validate({role: {"mini_batch_size": 100}})
    config = Config.model_validate({role: {"mini_batch_size": 4}})
    config.check_ranks(4)
    with pytest.raises(ConfigError, match=rf"{role}\.mini_batch_size=4 cannot be split evenly over 8 ranks"):
        config.check_ranks(8)
