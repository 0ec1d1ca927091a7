"""Responses that a checkpoint keeps for the steps after it."""

from pathlib import Path

import pytest
import torch

from trainer.algorithms.truncation import Truncation
from trainer.data.dataset import Prompt, SamplerState
from trainer.errors import CheckpointError
from trainer.experience.collector import Scores
from trainer.experience.sampled_ahead import SampledStep, read_steps, resumable_steps, write_steps
from trainer.experience.trajectory import Trajectory

PROMPTS = [Prompt(index, (1, 2 + index), "", "", "") for index in range(4)]


def place(position: int) -> SamplerState:
    return {"epoch": 0, "position": position, "size": 4, "seed": 0}


DONE = Trajectory(
    (1, 2), 0.7, 2**62, 8, [5, 6], [True, False], [-0.1, 0.0], [3, 4], done=True, turns=1, truncation=Truncation(0.9, 5)
)
STEPS = [
    SampledStep(
        *(7, [PROMPTS[0]] * 2, [DONE, Trajectory((1, 2), 1.0, 1, 8)], place(1)),
        Scores(torch.tensor([0.1, 1e30]), {"a": 0.3}, torch.tensor([0.5, 0.5]), [[(0, 0.25)], []], [{"b": 1.0}, {}]),
    ),
    SampledStep(8, [PROMPTS[3]], [Trajectory((1, 5), 1.0, 2, 8, [9], [True], [-2.5], [4])], place(2)),
]


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_steps(STEPS, tmp_path / "file", version=4)
    read = read_steps(tmp_path / "file", PROMPTS, version=4)
    assert [(step.step, step.prompts, step.rows, step.place) for step in read] == [
        (step.step, step.prompts, step.rows, step.place) for step in STEPS
    ]
    scores, expected = read[0].scores, STEPS[0].scores
    assert scores is not None
    assert expected is not None
    assert torch.equal(scores.values, expected.values)
    assert scores.greedy is not None
    assert (scores.greedy.tolist(), scores.metrics, scores.parts) == ([0.5, 0.5], expected.metrics, expected.parts)
    assert [list(row) for row in scores.by_token] == [[(0, 0.25)], []]
    assert read[1].scores is None


def test_versions_count_from_those_of_the_engines(tmp_path: Path) -> None:
    write_steps(STEPS, tmp_path / "file", version=4)
    assert read_steps(tmp_path / "file", PROMPTS, version=0)[0].rows[0].versions == [-1, 0]


def test_responses_that_other_settings_sampled_are_not_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def resumable(file: str, **changed: object) -> int:
        trainer = {"mode": "asynchronous", "max_staleness": 2, "total_steps": 9}
        now = {"data": 1, "rollout": {"temperature": 1.0}, "algorithm": 2, "reward": 3, "trainer": trainer}
        return len(resumable_steps(tmp_path / file, PROMPTS, 0, now, now | changed))

    write_steps(STEPS, tmp_path / "file", version=0)
    assert resumable("missing") == 0
    assert resumable("file", trainer={"mode": "asynchronous", "max_staleness": 2, "total_steps": 10}) == 2
    assert resumable("file", rollout={"temperature": 0.5}, reward=None) == 0
    assert "sampled again, because these settings changed: rollout, reward" in caplog.text
    assert resumable("file", trainer={"mode": "synchronous", "max_staleness": 2}) == 0
    assert resumable("file", trainer={"mode": "asynchronous", "max_staleness": 0.5}) == 0
    assert caplog.text.endswith("these settings changed: trainer.max_staleness\n")


@pytest.mark.parametrize("damage", ["cut", "other rows", "no description"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "file"
    write_steps(STEPS, file, version=0)
    content = file.read_bytes()
    changed = {
        "cut": content[:-3],
        "other rows": content.replace(rb"\"length\":2", rb"\"length\":1"),
        "no description": content.replace(b'"steps"', b'"Steps"'),
    }[damage]
    assert changed != content
    file.write_bytes(changed)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_steps(file, PROMPTS, version=0)


def test_a_prompt_that_is_gone_is_refused(tmp_path: Path) -> None:
    write_steps(STEPS, tmp_path / "file", version=0)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_steps(tmp_path / "file", PROMPTS[:3], version=0)
