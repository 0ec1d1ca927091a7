"""Whole runs on two ranks, which share the rows of a step unequally or compute them together."""

import pytest

from tests.trainer.whole_run import Runs


def first_step(runs: Runs, name: str, *settings: str) -> dict[str, float]:
    """The metrics of a step with nine responses and three mini-batches of three."""
    run = runs.start(
        name,
        "data.train_batch_size=3",
        "rollout.samples_per_prompt=3",
        "rollout.engine=transformers",
        "algorithm.advantage=grpo",
        "actor.mini_batch_size=3",
        "actor.optimizer.epsilon=1e-3",
        "actor.shuffle=false",
        "trainer.total_steps=1",
        "trainer.test_freq=-1",
        *settings,
    )
    run.succeed()
    return run.results(1)


def test_rows_that_do_not_divide_train_like_those_of_ranks_that_compute_all(runs: Runs) -> None:
    uneven = first_step(runs, "uneven")
    together = first_step(runs, "together", "actor.sharding.tensor_parallel=2")
    assert uneven["actor/gradient_norm"] > 0
    assert uneven["rollout/log_prob_difference"] < 1e-3
    for name, value in uneven.items():
        if name.startswith(("actor/", "reference/", "rollout/", "response")):
            assert together[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
