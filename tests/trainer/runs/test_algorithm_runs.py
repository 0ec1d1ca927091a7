"""Whole runs of algorithms other than PPO with a critic, on two Ray nodes with real engines."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoTokenizer

from tests.trainer.rewards.test_model import write_classifier
from tests.trainer.whole_run import ROOT, Run, Runs, workers_of

# One rank per role starts half as many processes.
ON_ONE_NODE = ("trainer.nnodes=1",)
# And an engine that starts in a third of vLLM's time, where a test is not about engines.
LIGHT = (*ON_ONE_NODE, "rollout.engine=transformers")


def counting_letters(directory: Path) -> list[str]:
    """Settings of a reward in which responses differ: a random model earns none from the rule."""
    (directory / "letters.py").write_text("def score(solution_str, **rest):\n    return len(set(solution_str))\n")
    return [f"reward.custom_function.path={directory / 'letters.py'}", "reward.custom_function.name=score"]


def with_many_ends(runs: Runs, directory: Path) -> Path:
    """The model, with many end tokens: a random one hardly ever ends its turn."""
    model = shutil.copytree(runs.model, directory / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(40))}))
    return model


def finished(run: Run) -> list[dict[str, float]]:
    run.succeed()
    return run.metrics()[1:]


def test_grpo_trains_without_a_critic_and_with_a_kl_loss(runs: Runs) -> None:
    run = runs.start(
        "grpo",
        "algorithm.advantage=grpo",
        "algorithm.kl_coefficient=0",
        "actor.kl_loss_coefficient=0.1",
        "actor.clip_ratio_high=0.28",
        "algorithm.correction=tis",
        "algorithm.dynamic_sampling=true",
        "algorithm.max_sampling_rounds=2",
        "trainer.total_steps=3",
        "trainer.profiler.enable=true",
    )
    rows = finished(run)
    assert len(rows) == 3
    for row in rows:
        assert not any(name.startswith("critic/") or name in ("time/values", "time/update_critic") for name in row)
        assert row["actor/gradient_norm"] > 0
        assert row["rollout/sampling_rounds"] == 2  # all rewards are 0, so no round fills the batch
        assert row["rollout/ratio_largest"] < 1.001
    assert rows[0]["actor/kl_loss"] < rows[2]["actor/kl_loss"]
    traces = sorted(path.name for path in (run.directory / "traces").iterdir())
    assert traces == [f"step_000002-{role}-rank{rank}.json" for role in ("actor", "reference") for rank in (0, 1)]
    (checkpoint,) = (run.directory / "checkpoints").iterdir()
    assert (checkpoint / "actor").is_dir()
    assert not (checkpoint / "critic").exists()


@pytest.mark.full
def test_the_optimal_token_baseline_learns_from_resampled_responses(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(
        "optimal_token_baseline",
        *LIGHT,
        "algorithm.advantage=optimal_token_baseline",
        "algorithm.kl_coefficient=0",
        "algorithm.resampling=power",
        "trainer.total_steps=1",
        *counting_letters(tmp_path),
    )
    (row,) = finished(run)
    assert row["actor/gradient_norm"] > 0
    assert row["time/squared_probabilities"] > 0


@pytest.mark.full
def test_remax_with_sequence_ratios_needs_neither_critic_nor_reference(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(
        "remax",
        *ON_ONE_NODE,
        "algorithm.advantage=remax",
        "algorithm.kl_coefficient=0",
        "actor.policy_loss=gspo",
        "actor.loss_aggregation=seq-mean-token-mean",
        "actor.clip_ratio=0.0003",
        "trainer.total_steps=2",
        *counting_letters(tmp_path),
        "actor.entropy_coefficient=0",
        # A single step needs no log-probs of the sampling policy.
        "actor.mini_batch_size=16",
        "rollout.compare_freq=0",
    )
    for row in finished(run):
        assert "time/old_log_prob" not in row
        assert row["actor/approximate_kl"] == row["actor/clip_fraction"] == 0
        assert not any(name.startswith(("critic/", "reference/")) for name in row)
        assert "time/reference" not in row
        assert row["actor/gradient_norm"] > 0


@pytest.mark.full
def test_engines_are_compared_in_every_other_step(runs: Runs) -> None:
    run = runs.start(
        "compared",
        *ON_ONE_NODE,
        "algorithm.advantage=grpo",
        "algorithm.kl_coefficient=0",
        "actor.mini_batch_size=16",
        "rollout.compare_freq=2",
        "trainer.total_steps=3",
    )
    rows = finished(run)
    for name in ("rollout/log_prob_difference", "time/old_log_prob"):
        assert [name in row for row in rows] == [True, False, True]
    assert all(row["actor/gradient_norm"] > 0 for row in rows)


@pytest.mark.full
def test_truncated_responses_do_not_train(runs: Runs) -> None:
    run = runs.start(
        "truncated",
        *ON_ONE_NODE,
        "algorithm.advantage=grpo",
        "algorithm.kl_coefficient=0",
        "algorithm.mask_truncated=true",
        "algorithm.old_log_probs=engine",
        "algorithm.rejection={seq_mean_k1: [0.5, 2]}",
        "reward.overlong_buffer=15",
        "actor.entropy_coefficient=0.1",  # would move the policy by every token that trains
        "trainer.total_steps=1",
    )
    (row,) = finished(run)
    assert "time/old_log_prob" not in row
    assert row["rollout/truncated_fraction"] > 0.9  # a random model hardly ever ends a response
    assert (row["actor/gradient_norm"] == 0) == (row["rollout/truncated_fraction"] == 1)


@pytest.mark.full
def test_a_teacher_equal_to_the_policy_leaves_it_as_it_is(runs: Runs) -> None:
    run = runs.start(
        "teacher",
        *LIGHT,
        "algorithm.advantage=reinforce_plus_plus",
        f"distillation.teacher={runs.model}",
        "actor.entropy_coefficient=0",
        "trainer.total_steps=1",
    )
    (row,) = finished(run)
    assert row["time/teacher"] > 0
    assert "time/reference" not in row  # the KL to it would be in a reward that is not used
    assert abs(row["actor/teacher_kl"]) < 1e-6
    assert row["actor/gradient_norm"] < 1e-4


def test_a_published_launch_line_trains(runs: Runs, tmp_path: Path) -> None:
    """verl's keys as its users write them, their own reward function included."""
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(letter in '0123456789' for letter in solution_str) / 16\n"
    )
    line = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={runs.data[0]}",
        f"data.val_files=['{runs.data[1]}']",
        "data.train_batch_size=8",
        "data.max_prompt_length=128",
        "data.max_response_length=16",
        "data.filter_overlong_prompts=True",
        f"actor_rollout_ref.model.path={runs.model}",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.001",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        f"custom_reward_function.path={tmp_path / 'mine.py'}",
        "trainer.logger='[\"console\"]'",
        "trainer.project_name='tests'",
        "trainer.experiment_name=published",
        f"+trainer.default_local_dir={runs.directory}",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=0",
        "trainer.test_freq=-1",
        "trainer.total_training_steps=3",
        "rollout.kv_cache_gib=0.1",
    ]
    run = runs.python(["-m", "trainer.main_ppo", *line], "published")
    rows = finished(run)
    assert len(rows) == 3
    for row in rows:
        assert row["reward/mean"] > 0
        assert row["reward/failed"] == 0
        assert row["actor/gradient_norm"] > 0
        assert not any(name.startswith("critic/") for name in row)


@pytest.mark.full
def test_a_gradient_that_is_not_finite_ends_the_run_and_is_kept(runs: Runs) -> None:
    """The first optimizer step makes the weights so large that the second one's forward pass overflows."""
    run = runs.start(
        "overflow",
        *LIGHT,
        "algorithm.advantage=rloo",
        "algorithm.kl_coefficient=0",
        "actor.learning_rate=1e30",
        "actor.ppo_epochs=2",
        "trainer.total_steps=2",
        "trainer.test_freq=-1",
    )
    status, errors = run.end()
    assert status == 5
    assert "Traceback" not in errors
    path = run.directory / "non_finite" / "actor_update_000001.json"
    assert f"see {path}" in errors
    report = json.loads(path.read_text())
    assert report["gradients"]["count"] > 0
    assert report["rows"][0]["prompt"]
    assert path.with_suffix(".safetensors").is_file()


@pytest.mark.full
def test_a_watchdog_rolls_the_weights_back_to_the_last_checkpoint(runs: Runs, tmp_path: Path) -> None:
    """The KL exceeds this low threshold as soon as the policy moves. The window keeps the watchdog silent until
    step 4, which finds the weights one update after the last checkpoint."""
    run = runs.start(
        "watched",
        *LIGHT,
        "trainer.total_steps=4",
        "trainer.save_freq=2",
        "watchdogs.kl.action=roll_back",
        "watchdogs.kl.threshold=1e-9",
        "watchdogs.kl.window=4",
        "algorithm.kl_estimator=k3",
    )
    rows = finished(run)
    assert ["watchdog/kl" in row for row in rows] == [False, False, False, True]
    assert ["actor/policy_loss" in row for row in rows] == [True, True, True, False]
    checkpoints = run.directory / "checkpoints"
    saved = actor_weights(checkpoints / "step_000002", tmp_path)
    rolled_back = actor_weights(checkpoints / "step_000004", tmp_path)
    assert saved.keys() == rolled_back.keys()
    assert all(torch.equal(saved[name], rolled_back[name]) for name in saved)


def actor_weights(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """The tensors of the actor in a checkpoint."""
    joined = scratch / f"{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint / "actor", joined)
    weights: dict[str, torch.Tensor] = torch.load(joined)["network"]
    return weights


def test_roles_have_nodes_of_their_own_and_weights_are_broadcast_over_gloo(runs: Runs, tmp_path: Path) -> None:
    """The actor on one node, the critic on both, engines and a reward model on the other one. A replacement for a dead
    engine gets the weights through the object store first, and receives the next broadcast."""
    judge = write_classifier(tmp_path / "judge", AutoTokenizer.from_pretrained(runs.model))
    run = runs.start(
        "split",
        "device_mapping.actor=node0:0",
        "device_mapping.rollout=node1:0",
        "device_mapping.reference=node1:0",
        "device_mapping.reward=node1:0",
        f"reward.model.path={judge}",
        "reward.weight=0",
        "rollout.weight_transfer=broadcast",
        "rollout.engine=transformers",
        "trainer.total_steps=6",
    )
    run.wait_for_step(1)
    next(workers_of(runs, "RolloutWorker.call")).kill()
    errors = run.succeed()
    assert "weights go to the engines through gloo, because rollout.weight_transfer=broadcast" in errors
    assert sum(line.startswith("critic ") for line in errors.splitlines()) == 2
    assert sum(line.startswith(("actor ", "rollout ", "reward ")) for line in errors.splitlines()) == 3
    assert "validation/reward_model" in run.metrics()[0]
    assert sum(row["rollout/repairs"] for row in run.metrics()[1:]) == 1
    for row in run.metrics()[1:]:
        assert row["reward/mean"] == pytest.approx(row["reward/model"], abs=1e-6)
        assert row["reward/mean"] != row["reward/rule"]
        assert row["rollout/log_prob_difference"] < 1e-3
        assert row["actor/gradient_norm"] > 0


def test_one_step_off_learns_from_the_policy_before_the_last_update(runs: Runs) -> None:
    settings = (*LIGHT, "trainer.mode=one_step_off", "algorithm.correction=tis", "trainer.total_steps=4")
    run = runs.start("one-step-off", *settings, "trainer.save_freq=2")
    rows = finished(run)
    assert len(rows) == 4
    # The first batch comes from the current policy; the others are one update old, which shows in the ratio.
    assert rows[0]["rollout/log_prob_difference"] < 1e-3
    assert min(row["rollout/log_prob_difference"] for row in rows[1:]) > 1e-3
    assert all(row["actor/gradient_norm"] > 0 for row in rows)
    assert len(list((run.directory / "checkpoints").iterdir())) == 2
    # A resumed run learns from the same responses, which older weights than the checkpoint's have sampled.
    resumed = runs.start("resumed-off", *settings, f"trainer.resume={run.directory / 'checkpoints' / 'step_000002'}")
    resumed.succeed()
    assert [row["step"] for row in resumed.metrics()] == [3, 4]
    for step in (3, 4):
        assert resumed.results(step) == run.results(step)


@pytest.mark.full
def test_a_policy_that_uses_a_calculator_learns_only_from_its_own_tokens(runs: Runs, tmp_path: Path) -> None:
    """With Transformers as the engine."""
    run = runs.start(
        "calculator",
        f"model.path={with_many_ends(runs, tmp_path)}",
        f"rollout.environment.path={ROOT / 'examples' / 'calculator' / 'environment.py'}",
        "rollout.environment.name=Calculator",
        "rollout.max_turns=2",
        "data.max_response_length=160",
        *LIGHT,
        "trainer.total_steps=2",
        "trainer.save_freq=0",
    )
    errors = run.succeed()
    assert "engines sample with transformers, because rollout.engine=transformers" in errors
    for row in run.metrics()[1:]:
        assert 1.2 < row["rollout/turns"] <= 2
        # Engine and trainer agree on every token after the calculator's, so both read the same conversation.
        assert row["rollout/log_prob_difference"] < 1e-3
        assert row["actor/gradient_norm"] > 0
        assert row["reward/failed"] == 0
    samples = [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]
    assert any("Write calc: EXPRESSION to calculate" in sample["response"] for sample in samples)


@pytest.mark.full
def test_asynchronous_responses_continue_under_new_weights(runs: Runs) -> None:
    run = runs.start(
        "asynchronous",
        *LIGHT,
        "trainer.mode=asynchronous",
        "trainer.max_staleness=2",
        "rollout.segment_length=4",
        "algorithm.correction=tis",
        "trainer.total_steps=5",
        "trainer.save_freq=3",
    )
    rows = finished(run)
    assert len(rows) == 5
    assert rows[0]["rollout/staleness_max"] == 0
    assert 0 < max(row["rollout/staleness_max"] for row in rows) <= 2
    # A token's log-prob comes from the weights that sampled it; the actor has been updated since.
    assert max(row["rollout/log_prob_difference"] for row in rows[2:]) > 1e-3
    assert all(row["actor/gradient_norm"] > 0 for row in rows)
    assert {"validation/exact_match" in row for row in rows} == {True, False}
    assert len(list((run.directory / "checkpoints").iterdir())) == 2


def test_an_agent_program_is_trained_as_it_is(runs: Runs, tmp_path: Path) -> None:
    """With Transformers as the engine. The program speaks plain HTTP."""
    run = runs.start(
        "program",
        f"model.path={with_many_ends(runs, tmp_path)}",
        "rollout.agent=program",
        f"rollout.program.command=[{sys.executable},{ROOT / 'examples' / 'program' / 'agent.py'}]",
        "rollout.program.processes=4",
        "rollout.environment_timeout=60",
        "rollout.segment_length=64",
        "data.max_response_length=160",
        *LIGHT,
        "trainer.total_steps=2",
        "trainer.save_freq=0",
    )
    run.succeed()
    for row in run.metrics()[1:]:
        assert 1.2 < row["rollout/turns"] <= 2
        # Engine and trainer agree on every token, so both read the same conversation.
        assert row["rollout/log_prob_difference"] < 1e-3
        assert row["rollout/failed_programs"] == row["reward/failed"] == 0
        assert row["actor/gradient_norm"] > 0
