"""Whole runs on two Ray nodes with real engines: training, resuming, and ending early in the right way."""

import io
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.runs.checkpoints import slow_trajectories
from tests.trainer.small_model import write_small_model
from tests.trainer.whole_run import DEADLINE, Run, Runs, workers_of
from trainer.errors import CheckpointError
from trainer.records.files.records import WAITS_ROWS, read_records
from trainer.records.files.run_files import recorded_trajectories
from trainer.records.pages.report import SLOWEST, write_report
from trainer.records.top import watch
from trainer.records.trajectories import FOLDER, recorded_steps
from trainer.records.waits import noticed
from trainer.runs.checkpoints.checkpoint import read_checkpoint
from trainer.runs.checkpoints.export import export_checkpoint
from trainer.runs.reproduction.certificate import read_certificate
from trainer.runs.reproduction.verify import verify


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs) -> Run:
    """Four steps on two ranks, with a checkpoint in the middle."""
    run = runs.start(
        "uninterrupted", "trainer.total_steps=4", "trainer.save_freq=2", "trainer.trajectories.per_token=true"
    )
    run.succeed()
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
        assert_use_is_seen(row)
    assert rows[1]["reference/kl"] == pytest.approx(0, abs=1e-6)
    assert abs(rows[4]["reference/kl"]) > 1e-6


def assert_use_is_seen(row: dict[str, float]) -> None:
    """What a step does with its hardware, as far as machines without GPUs show it."""
    passes = ("old_log_prob", "reference", "values", "update_critic", "update_actor")
    assert all(row[f"tflops/{phase}"] > 0 for phase in passes)
    assert row["tflops/update_actor"] * row["time/update_actor"] > 2 * row["tflops/values"] * row["time/values"]
    assert not [name for name in row if name.startswith(("mfu/", "gpu/"))]
    assert 0 < row["engines/busy_lowest"] <= row["engines/busy"] <= 1 <= row["engines/imbalance"] <= 2
    sampled = 16 * row["rollout/response_length"] / row["time/generate"]
    assert row["throughput/generated_tokens_per_second"] == pytest.approx(sampled)
    for role in ("rollout", "actor", "critic", "reference"):
        assert 0 <= row[f"idle/{role}"] < row["time/step"]
        assert 0 <= row[f"waiting/{role}"] < row["time/step"]


def test_report_and_top_show_the_use_of_the_hardware_and_noticeable_waits(uninterrupted: Run) -> None:
    waits = read_records(uninterrupted.directory / "waits.jsonl", WAITS_ROWS, pytest.fail)
    assert [row["step"] for row in waits] == [1, 2, 3, 4]
    assert re.match(r"rollout rank [01] on [0-9.]+$", waits[-1]["waits"]["rollout"]["slowest"])
    report = write_report(uninterrupted.directory).read_text()
    for text in ("TFLOP/s of a device", "Sampled tokens per second"):
        assert text in report
    seen = noticed(waits, sum(row["time/step"] for row in uninterrupted.metrics()[1:]))
    assert all(wait.worker in report for wait in seen[:SLOWEST])
    assert ("Workers that others waited for" in report) == bool(seen)
    assert "MFU" not in report
    console = Console(file=io.StringIO(), width=100)
    watch(uninterrupted.directory, console)
    assert "engines busy" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_result_is_a_model_that_transformers_loads(uninterrupted: Run, runs: Runs) -> None:
    exported = uninterrupted.directory / "model"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("How many are 1 + 2?", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    before, after = load_file(runs.model / "model.safetensors"), load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_every_response_is_recorded(uninterrupted: Run) -> None:
    metrics = uninterrupted.metrics()
    for step in range(1, 5):
        rows = recorded_trajectories(uninterrupted.directory, step)
        assert len(rows) == 16
        assert sum(row["reward"] for row in rows) / 16 == pytest.approx(metrics[step]["reward/mean"])
        assert sum(row["tokens"] for row in rows) / 16 == metrics[step]["rollout/response_length"]
        for row in rows:
            assert len(row["token_ids"]) == len(row["log_probs"]) == len(row["advantages"]) == row["tokens"]
            assert max(row["log_probs"]) <= 0
    held_out = recorded_trajectories(uninterrupted.directory, 0, validation=True)
    assert len(held_out) == 8
    assert sum(row["reward"] == 1.0 for row in held_out) / 8 == metrics[0]["validation/exact_match"]
    assert any(any(row["advantages"]) for row in rows)  # of the last step: the first has no reward and no KL


def test_a_run_killed_after_a_checkpoint_has_all_responses_before_it_though_the_disk_is_slow(runs: Runs) -> None:
    program = [slow_trajectories.__file__, "5"]
    run = runs.start("slow_trajectories", "trainer.save_freq=2", "trainer.test_freq=-1", program=program)
    deadline = time.monotonic() + DEADLINE
    while not (saved := recorded_checkpoints(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    run.process.kill()
    run.end()
    assert saved == [2]
    assert recorded_steps(run.directory / FOLDER)[:2] == [1, 2]


def test_a_run_that_is_good_enough_stays_ended_when_it_is_started_again(runs: Runs) -> None:
    settings = ("trainer.stop_at=0", "trainer.resume=auto", "trainer.test_before_training=false")
    for _ in range(2):
        run = runs.start("good-enough", "trainer.nnodes=1", "trainer.total_steps=4", *settings)
        run.succeed()
        assert [row["step"] for row in run.metrics()] == [1, 2]


def recorded_checkpoints(run: Run) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in (run.directory / "checkpoints").glob("step_*")]


def test_every_checkpoint_can_be_exported(uninterrupted: Run, runs: Runs) -> None:
    run = uninterrupted.directory
    written = {step: export_checkpoint(run, step, None, None) for step in (2, 4)}
    assert written[4] == run / "models" / "step_000004"
    final = load_file(run / "model" / "model.safetensors")
    for step, directory in written.items():
        AutoModelForCausalLM.from_pretrained(directory)
        AutoTokenizer.from_pretrained(directory)
        weights = load_file(directory / "model.safetensors")
        assert weights.keys() == final.keys()
        assert all(torch.equal(weights[name], final[name]) for name in final) == (step == 4)
    card = (written[2] / "README.md").read_text()
    assert f"# {run.name}, step 2" in card
    assert f"| reward/mean | {uninterrupted.metrics()[2]['reward/mean']:.6g} | 2 |" in card
    assert card != (run / "model" / "README.md").read_text() == (written[4] / "README.md").read_text()
    with pytest.raises(CheckpointError, match="step_000003: no such checkpoint"):
        export_checkpoint(run, 3, None, None)
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        export_checkpoint(runs.directory / "nowhere", None, None, None)


def test_a_replay_has_the_same_weights_to_the_bit_and_a_changed_byte_is_found(uninterrupted: Run, runs: Runs) -> None:
    run = uninterrupted.directory
    certified = read_certificate(run)
    assert certified.steps == [2, 4]
    assert certified.weights(4).keys() == {"actor", "critic", "model"}
    assert certified.weights(2)["actor"] != certified.weights(4)["actor"]
    assert certified.hardware is not None
    assert len(certified.hardware.devices["actor"]) == certified.hardware.nodes == 2

    replayed = runs.replay(uninterrupted, "--step", "2")
    assert [row["step"] for row in replayed.metrics()] == [0, 1, 2]
    again = read_certificate(replayed.directory).weights(2)
    assert {role: again[role] for role in ("actor", "critic")} == certified.weights(2)

    shard = next((replayed.directory / "checkpoints" / "step_000002" / "actor").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (line,) = verify(replayed.directory)
    assert f"damaged: actor/{shard.name} changed since it was written (SHA-256)" in line


def test_a_resumed_run_goes_on_with_the_same_metrics_even_when_it_loses_an_engine(
    uninterrupted: Run, runs: Runs
) -> None:
    checkpoint = uninterrupted.directory / "checkpoints" / "step_000002"
    resumed = runs.start("resumed", "trainer.total_steps=1000", f"trainer.resume={checkpoint}", "trainer.save_freq=3")
    resumed.wait_for_step(3)
    # An engine dies during generation; its replacement samples the same responses.
    next(workers_of(runs, "RolloutWorker.call")).kill()
    resumed.wait_for_step(4)
    assert [row["step"] for row in resumed.metrics()][:2] == [3, 4]
    assert [row["rollout/repairs"] for row in resumed.metrics()[:2]] == [0, 1]
    for step in (3, 4):
        assert resumed.results(step) == uninterrupted.results(step)

    # The run then loses its actor: it ends, names the actor, and its checkpoint is complete.
    next(workers_of(runs, "ActorWorker")).kill()
    status, errors = resumed.end()
    assert status == 5
    assert "Traceback" not in errors
    assert "error: actor rank" in errors
    assert "died during" in errors
    assert read_checkpoint(resumed.directory / "checkpoints" / "step_000003", model=runs.model).step == 3


def test_sigterm_saves_the_last_step_and_says_how_to_go_on(uninterrupted: Run, runs: Runs) -> None:
    """On one rank, from a checkpoint of two."""
    checkpoint = uninterrupted.directory / "checkpoints" / "step_000004"
    run = runs.start("stopped", "trainer.total_steps=1000", f"trainer.resume={checkpoint}", "trainer.nnodes=1")
    run.wait_for_step(5)
    run.process.send_signal(signal.SIGTERM)
    status, errors = run.end()
    assert status == 143
    (saved,) = (run.directory / "checkpoints").iterdir()
    assert f"continue with trainer.resume={saved}" in errors
    assert read_checkpoint(saved, model=runs.model).step == run.metrics()[-1]["step"]


def test_a_killed_reward_worker_is_replaced_and_a_run_that_fails_saves_its_finished_steps(
    runs: Runs, tmp_path: Path
) -> None:
    """By default settings."""
    (tmp_path / "reward.py").write_text(
        "from pathlib import Path\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    return float('nan') if Path({str(tmp_path / 'fail')!r}).exists() else 1.0\n"
    )
    function = f"reward.custom_function.path={tmp_path / 'reward.py'}"
    settings = ("trainer.total_steps=1000", "trainer.nnodes=1", "rollout.engine=transformers", function)
    run = runs.start("unrewarded", *settings)
    run.wait_for_step(1)
    next(workers_of(runs, "RewardWorker")).kill()
    run.wait_for_step(int(run.metrics()[-1]["step"]) + 2)
    assert sum(row.get("reward/repairs", 0) for row in run.metrics()) == 1
    (tmp_path / "fail").touch()
    status, errors = run.end()
    assert status == 6
    assert "error: the reward function returned nan" in errors
    (saved,) = (run.directory / "checkpoints").iterdir()
    assert f"continue with trainer.resume={saved}" in errors
    assert read_checkpoint(saved, model=runs.model).step == run.metrics()[-1]["step"]
    assert export_checkpoint(run.directory, None, None, None).is_dir()


def test_a_checkpoint_of_another_model_is_refused_at_once(uninterrupted: Run, runs: Runs, tmp_path: Path) -> None:
    other = write_small_model(tmp_path / "other", seed=1)
    checkpoint = uninterrupted.directory / "checkpoints" / "step_000002"
    run = runs.start("refused", f"model.path={other}", f"trainer.resume={checkpoint}")
    status, errors = run.end()
    assert status == 4
    assert "belongs to another model" in errors
    assert not run.directory.exists()
