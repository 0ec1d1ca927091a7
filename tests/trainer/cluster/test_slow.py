"""A worker that is far slower than the others is named once."""

from trainer.cluster.stalls.slow import CALLS, SlowWorkers


def test_the_same_slow_worker_in_several_calls_in_a_row_is_named_once() -> None:
    slow, seconds = SlowWorkers(), {"rollout rank 0": 2.0, "rollout rank 1": 2.2, "rollout rank 2": 6.3}
    said = [slow.compare("generate", seconds) for _ in range(CALLS + 2)]
    assert said == [
        *[""] * (CALLS - 1),
        "rollout rank 2 took 3.0 times the median of the others in each of the last 5 calls",
        "",
        "",
    ]


def test_workers_that_take_turns_in_being_slow_are_healthy() -> None:
    slow = SlowWorkers()
    for number in range(20):
        seconds = {f"rollout rank {rank}": 6.0 if rank == number % 4 else 2.0 for rank in range(4)}
        assert slow.compare("generate", seconds) == ""


def test_short_calls_are_not_compared() -> None:
    slow = SlowWorkers()
    assert [slow.compare("score", {"reward rank 0": 0.01, "reward rank 1": 0.9}) for _ in range(10)] == [""] * 10
