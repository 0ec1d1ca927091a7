"""Whole runs on two ranks, which share the rows of a step unequally or compute them together."""

import pytest

from tests.trainer.whole_run import Runs

TRAINED = ("actor", "critic")


def second_step(runs: Runs, name: str, *settings: str) -> dict[str, float]:
    """The metrics of the second of two steps with nine responses and three mini-batches of three."""
    run = runs.start(
        name,
        "data.train_batch_size=3",
        "rollout.samples_per_prompt=3",
        "rollout.engine=transformers",
        *(f"{role}.mini_batch_size=3" for role in TRAINED),
        *(f"{role}.optimizer.epsilon=1e-3" for role in TRAINED),
        *(f"{role}.shuffle=false" for role in TRAINED),
        "trainer.total_steps=2",
        "trainer.test_freq=-1",
        *settings,
    )
    run.succeed()
    return run.results(2)


@pytest.fixture(scope="module")
def uneven(runs: Runs) -> dict[str, float]:
    return second_step(runs, "uneven")


@pytest.mark.parametrize("setting", ["tensor_parallel", "context_parallel"])
def test_rows_that_do_not_divide_train_like_those_of_ranks_that_compute_all(
    runs: Runs, uneven: dict[str, float], setting: str
) -> None:
    together = second_step(runs, setting, *(f"{role}.sharding.{setting}=2" for role in TRAINED))
    for role in TRAINED:
        assert uneven[f"{role}/gradient_norm"] > 0
    assert uneven["rollout/log_prob_difference"] < 1e-3
    for name, value in uneven.items():
        if name.startswith(("actor/", "critic/", "reference/", "rollout/", "response")):
            assert together[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
