"""The state of a run for tests that only write it down."""

from typing import Any

from trainer.runs.checkpoints.manifest import TrainingState


def training_state(step: int, **entries: Any) -> TrainingState:
    sampler = {"epoch": 0, "position": 0, "size": 8, "seed": 0}
    return TrainingState.model_validate({"step": step, "seed": 0, "sampler": sampler, "config": {}, **entries})
