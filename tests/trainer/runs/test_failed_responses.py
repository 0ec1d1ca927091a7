"""Runs in which rewards raise and environments fail."""

from pathlib import Path

import pytest

from tests.trainer.whole_run import Runs

# Every fourth response of a prompt fails.
RAISES_ON_SOME = """
from itertools import count

calls = count()

def compute_score(data_source, solution_str, ground_truth, extra_info):
    number = next(calls)
    if number % 4 == 0:
        raise KeyError("lost")
    return float(number % 4 > 1)
"""


def reward(path: Path, source: str) -> str:
    path.write_text(source)
    return f"reward.custom_function.path={path}"


def test_failed_responses_are_left_out_and_counted(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(
        "some",
        reward(tmp_path / "some.py", RAISES_ON_SOME),
        "reward.processes=1",
        "algorithm.advantage=grpo",
        "rollout.samples_per_prompt=4",
        "trainer.total_steps=2",
        "trainer.test_freq=-1",
        "trainer.save_freq=0",
    )
    errors = run.succeed()
    assert "KeyError: 'lost'" in errors
    for row in [row for row in run.metrics() if row["step"] > 0]:
        assert row["rollout/failed"] == row["rollout/failed/reward_error"] == 0.25
        assert row["reward/mean"] > 0.6  # of the answers; 0.5 with failures as zeros


def test_a_step_with_too_many_failures_ends_the_run_with_the_first_traceback(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(
        "most",
        reward(tmp_path / "most.py", RAISES_ON_SOME),
        "reward.processes=1",
        "rollout.max_failed_share=0.2",
        "trainer.total_steps=2",
    )
    status, errors = run.end()
    assert status == 6
    assert "more than rollout.max_failed_share=0.2 allows; first failure: KeyError: 'lost'" in errors
    assert 'raise KeyError("lost")' in errors


# Its first conversation about every other question is lost.
LOSES_SOME = """
from trainer.experience.environment import Observation

begun = []

class Game:
    def reset(self, prompt, seed):
        begun.append(prompt.index)
        if prompt.index % 2 == 0 and begun.count(prompt.index) == 1:
            raise ConnectionError("lost")

    def step(self, turn):
        return Observation(done=True, score=float(len(turn.token_ids) % 2))
"""


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_a_conversation_that_is_lost_is_sampled_again(runs: Runs, tmp_path: Path, mode: str) -> None:
    (tmp_path / "game.py").write_text(LOSES_SOME)
    run = runs.start(
        mode,
        f"rollout.environment.path={tmp_path / 'game.py'}",
        "rollout.environment.name=Game",
        "rollout.max_failed_share=0",
        "algorithm.advantage=grpo",
        *([] if mode == "synchronous" else ["trainer.mode=asynchronous", "algorithm.correction=tis"]),
        "trainer.total_steps=2",
        "trainer.save_freq=0",
    )
    errors = run.succeed()
    assert "is sampled again (environment_error): environment: ConnectionError: lost" in errors
    steps = [row for row in run.metrics() if row["step"] > 0]
    assert {row["rollout/failed"] for row in steps} == {0.0}
    assert sum(row.get("rollout/retried/environment_error", 0.0) for row in steps) > 0
    assert {row["validation/failed"] for row in run.metrics() if "validation/failed" in row} == {0.0}
