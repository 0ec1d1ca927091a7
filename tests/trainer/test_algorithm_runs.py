"""Whole runs of algorithms other than PPO with a critic, on two Ray nodes with real engines."""

from tests.trainer.whole_run import Run, Runs


def finished(run: Run) -> list[dict[str, float]]:
    status, errors = run.end()
    assert status == 0, errors
    return run.metrics()[1:]


def test_grpo_trains_without_a_critic_and_holds_the_policy_with_a_loss(runs: Runs) -> None:
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
    )
    rows = finished(run)
    assert len(rows) == 3
    for row in rows:
        assert not any(name.startswith("critic/") or name in ("time/values", "time/update_critic") for name in row)
        assert row["actor/gradient_norm"] > 0
        assert row["rollout/sampling_rounds"] == 2  # all rewards are 0, so no round fills the batch
        assert row["rollout/ratio_largest"] < 1.001
    assert rows[0]["actor/kl_loss"] < rows[2]["actor/kl_loss"]
    (checkpoint,) = (run.directory / "checkpoints").iterdir()
    assert (checkpoint / "actor").is_dir()
    assert not (checkpoint / "critic").exists()


def test_remax_with_sequence_ratios_needs_neither_critic_nor_reference(runs: Runs) -> None:
    run = runs.start(
        "remax",
        "algorithm.advantage=remax",
        "algorithm.kl_coefficient=0",
        "actor.policy_loss=gspo",
        "actor.loss_aggregation=seq-mean-token-mean",
        "actor.clip_ratio=0.0003",
        "trainer.total_steps=2",
        # A random model earns no reward. The price of length is something that its responses differ in.
        "reward.overlong_buffer=15",
        "actor.entropy_coefficient=0",
    )
    for row in finished(run):
        assert not any(name.startswith(("critic/", "reference/")) for name in row)
        assert "time/reference" not in row
        assert row["actor/gradient_norm"] > 0
