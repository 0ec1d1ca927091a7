"""Reward workers that die: real ones on a Ray cluster, with a fake rule."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.trainer.ray_node import ray_node
from trainer.cluster.nodes import Slot, find_nodes, reserve_slots
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config
from trainer.errors import RewardError, WorkerError
from trainer.experience.reward_workers import MOST_FAILURES, RewardWorkers, Scorer
from trainer.rewards.answer import Answer, Scored


class Judge:
    """The reward of a response is the number in it. Some responses kill the process."""

    def __init__(self, died: Path) -> None:
        self._died = died

    def score(self, answers: Sequence[Answer]) -> list[Scored]:
        for answer in answers:
            if answer.response == "fails":
                return [Scored(0.0, "KeyError: 'x'", traceback="Traceback: line 3") for _ in answers]
            if answer.response == "wrong":
                raise RewardError("not a number")
            if answer.response == "kills" or (answer.ground_truth == "kills once" and not self._died.exists()):
                self._died.touch()
                os._exit(1)
        return [Scored(float(answer.response)) for answer in answers]


@pytest.fixture(scope="module")
def slots() -> Iterator[list[Slot]]:
    with ray_node():
        yield reserve_slots(find_nodes(1, 0) * 2, 0, timeout=60)


@pytest.fixture
def new_rewards(slots: list[Slot], tmp_path: Path) -> RewardWorkers:
    """Two workers that have started."""
    group = WorkerGroup[Scorer]("reward", timeout=60)
    for slot in slots:
        group.add(slot, partial(Judge, tmp_path / "died"), {}, gpus=0)
    return RewardWorkers(group, Config.model_validate({"model": {"path": "/nowhere"}}))


@pytest.fixture
def rewards(new_rewards: RewardWorkers) -> RewardWorkers:
    assert values(new_rewards, "0", "0") == [0, 0]
    return new_rewards


def test_the_run_ends_if_all_of_the_first_rewards_fail(new_rewards: RewardWorkers) -> None:
    with pytest.raises(RewardError) as caught:
        values(new_rewards, "fails", "fails", "fails")
    message = "all 3 rewards of the first responses failed; first failure: KeyError: 'x'\n\nTraceback: line 3"
    assert (str(caught.value), caught.value.exit_code) == (message, 6)


def test_once_a_reward_has_succeeded_failures_cost_their_responses(rewards: RewardWorkers) -> None:
    assert values(rewards, "fails", "fails") == [0.0, 0.0]


def values(rewards: RewardWorkers, *responses: str, truths: Sequence[str] = ()) -> list[float]:
    answers = [
        Answer(text, truth, "", {}) for text, truth in zip(responses, truths or [""] * len(responses), strict=True)
    ]
    return [score.value for score in rewards.score(answers, range(10, 10 + len(answers)))]


def test_a_dead_worker_is_replaced_and_its_answers_are_scored_again(
    rewards: RewardWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    assert values(rewards, "1", "2", "3", "4", truths=["", "", "", "kills once"]) == [1, 2, 3, 4]
    assert rewards.take_repairs() == 1
    assert "reward worker 1 is restarted and scores its rows again: reward rank 1 on" in caplog.text
    assert values(rewards, "5", "6", "7") == [5, 6, 7]
    assert rewards.take_repairs() == 0


def test_rows_that_kill_every_worker_end_the_run_and_are_named(rewards: RewardWorkers) -> None:
    with pytest.raises(WorkerError, match=r"3 times in a row for rows 12, 13 of the data: reward rank 1 .* died"):
        values(rewards, "1", "2", "3", "kills")
    assert rewards.take_repairs() == MOST_FAILURES - 1


def test_a_refused_reward_is_not_tried_again(rewards: RewardWorkers) -> None:
    with pytest.raises(RewardError, match="not a number"):
        values(rewards, "1", "wrong")
    assert rewards.take_repairs() == 0
