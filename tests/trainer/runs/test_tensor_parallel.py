"""A whole run whose engine spans two processes, one of which dies."""

from tests.trainer.whole_run import Runs, workers_of


def test_an_engine_over_two_processes_follows_the_actor_and_is_replaced_as_a_whole(runs: Runs) -> None:
    run = runs.start(
        "spanning",
        "rollout.tensor_parallel=2",
        "rollout.engine=vllm",
        "algorithm.advantage=grpo",  # needs no critic, so the run is short
        "trainer.nnodes=1",
        "trainer.total_steps=4",
        "trainer.test_freq=-1",
    )
    run.wait_for_step(1)
    next(workers_of(runs, "RolloutWorker")).kill()
    run.succeed()
    steps = [row for row in run.metrics() if row["step"] > 0]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert sum(row["rollout/repairs"] for row in steps) == 1
    assert all(row["rollout/log_prob_difference"] < 1e-3 for row in steps)
    assert steps[-1]["reference/kl"] > 1e-4  # the actor has moved away from where the engine started
