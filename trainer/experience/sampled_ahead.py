"""Responses that were sampled for the steps after a checkpoint, written with it: a resumed run learns from the same."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.algorithms.truncation import Truncation
from trainer.data.dataset import Dataset, Prompt, SamplerState
from trainer.errors import CheckpointError
from trainer.experience.collector import Scores
from trainer.experience.trajectory import Trajectory
from trainer.records.files.checksums import sha256
from trainer.records.files.disk import writing

logger = logging.getLogger(__name__)

FILE = "sampled_ahead.safetensors"
_STEPS = "steps"
# The settings that decide responses, their scores and how old they may be.
_SAMPLED_BY = ("data", "rollout", "algorithm", "reward", "trainer.mode", "trainer.max_staleness")
# The entries per token, with their types. Engines return log-probs as Python's floats.
_PER_TOKEN = {
    "token_ids": torch.int32,
    "mask": torch.bool,
    "log_probs": torch.float64,
    "versions": torch.int32,
}


@dataclass(frozen=True)
class SampledStep:
    """The prompts and responses of a step, finished or not, and their scores once they are known.

    `place` is the sampler's state after its prompts.
    """

    step: int
    prompts: list[Prompt]
    rows: list[Trajectory]
    place: SamplerState
    scores: Scores | None = None


def write_steps(steps: Sequence[SampledStep], file: Path, version: int) -> str:
    """Writes steps whose responses no environment answers any more, and returns the file's SHA-256. `version` is that
    of the engines' weights. Raises CheckpointError.
    """
    rows = [row for step in steps for row in step.rows]
    tensors = {
        name: torch.tensor([entry for row in rows for entry in getattr(row, name)], dtype=kind)
        for name, kind in _PER_TOKEN.items()
    }
    tensors["versions"] -= version
    tensors["prompts"] = torch.tensor([token for row in rows for token in row.prompt], dtype=torch.int32)
    with writing(file, sum(tensor.nbytes for tensor in tensors.values())):
        save_file(tensors, file, metadata={_STEPS: _Steps.of(steps).model_dump_json()})
        return sha256(file)


def resumable_steps(
    file: Path, dataset: Dataset, version: int, earlier: Mapping[str, Any], now: Mapping[str, Any]
) -> list[SampledStep]:
    """The steps in a checkpoint's file; none if there is no file, or if the settings that sampled them have changed
    between the run's `earlier` part and `now`. Raises CheckpointError."""
    if not file.exists():
        return []
    if changed := [name for name in _SAMPLED_BY if _entry(earlier, name) != _entry(now, name)]:
        logger.warning(
            "%s holds responses for the next steps; they are sampled again, because these settings changed: %s",
            *(file, ", ".join(changed)),
        )
        return []
    return read_steps(file, dataset, version)


def _entry(settings: Mapping[str, Any], name: str) -> Any:
    section, _, entry = name.partition(".")
    value = settings.get(section)
    return value.get(entry) if entry and isinstance(value, Mapping) else value


def read_steps(file: Path, dataset: Dataset, version: int) -> list[SampledStep]:
    """The steps in a file, for engines whose weights have this version. Raises CheckpointError."""
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in (*_PER_TOKEN, "prompts")}
            described = _Steps.model_validate_json(opened.metadata()[_STEPS])
        tensors["versions"] += version
        return described.steps_with(tensors, dataset)
    except (OSError, SafetensorError, ValidationError, KeyError, IndexError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file}: cannot be read: {error}", hint="remove the checkpoint, or resume from another one"
        ) from error


class _Row(BaseModel):
    """What a trajectory holds besides its tokens."""

    index: int
    prompt_length: int
    length: int
    temperature: float
    seed: int
    limit: int
    turn_start: int
    turns: int
    answers: int
    done: bool
    truncated: bool
    truncation: Truncation
    with_log_probs: bool

    @staticmethod
    def of(prompt: Prompt, row: Trajectory) -> "_Row":
        same = {name: getattr(row, name) for name in _Row.model_fields if hasattr(row, name)}
        return _Row(index=prompt.index, prompt_length=len(row.prompt), length=len(row.token_ids), **same)

    def trajectory(
        self,
        prompt: Sequence[int],
        token_ids: list[int],
        mask: list[bool],
        log_probs: list[float],
        versions: list[int],
    ) -> Trajectory:
        trajectory = Trajectory(
            tuple(prompt), self.temperature, self.seed, self.limit, token_ids, mask, log_probs, versions
        )
        for name in ("turn_start", "turns", "answers", "done", "truncated", "truncation", "with_log_probs"):
            setattr(trajectory, name, getattr(self, name))
        return trajectory


class _Scores(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")

    values: list[float]
    metrics: dict[str, float]
    greedy: list[float] | None
    by_token: list[list[tuple[int, float]]]
    parts: list[dict[str, float]]
    left_out: list[bool] | None = None

    @staticmethod
    def of(scores: Scores) -> "_Scores":
        return _Scores(
            values=scores.values.tolist(),
            metrics=scores.metrics,
            greedy=None if scores.greedy is None else scores.greedy.tolist(),
            by_token=[list(row) for row in scores.by_token],
            parts=[dict(row) for row in scores.parts],
            left_out=None if scores.left_out is None else scores.left_out.tolist(),
        )

    def scores(self) -> Scores:
        greedy = None if self.greedy is None else torch.tensor(self.greedy)
        left_out = None if self.left_out is None else torch.tensor(self.left_out)
        return Scores(torch.tensor(self.values), self.metrics, greedy, self.by_token, self.parts, left_out)


class _Step(BaseModel):
    step: int
    place: SamplerState
    rows: list[_Row]
    scores: _Scores | None


class _Steps(BaseModel):
    steps: list[_Step]

    @staticmethod
    def of(steps: Sequence[SampledStep]) -> "_Steps":
        return _Steps(
            steps=[
                _Step(
                    step=step.step,
                    place=step.place,
                    rows=[_Row.of(*pair) for pair in zip(step.prompts, step.rows, strict=True)],
                    scores=_Scores.of(step.scores) if step.scores else None,
                )
                for step in steps
            ]
        )

    def steps_with(self, tensors: dict[str, Tensor], dataset: Dataset) -> list[SampledStep]:
        """The steps, with the tokens of all rows one after the other. Raises ValueError if their numbers differ."""
        rows = [row for step in self.steps for row in step.rows]
        lengths = [row.length for row in rows]
        columns = [_divided(tensors[name], lengths) for name in _PER_TOKEN]
        prompts = _divided(tensors["prompts"], [row.prompt_length for row in rows])
        trajectories = iter([row.trajectory(*entries) for row, *entries in zip(rows, prompts, *columns, strict=True)])
        drawn = {index: dataset[index] for index in dict.fromkeys(row.index for row in rows)}
        return [
            SampledStep(
                step.step,
                [drawn[row.index] for row in step.rows],
                [next(trajectories) for _ in step.rows],
                step.place,
                step.scores.scores() if step.scores else None,
            )
            for step in self.steps
        ]


def _divided(entries: Tensor, lengths: Sequence[int]) -> list[list[Any]]:
    """The entries of each row. Raises ValueError if there are more or fewer."""
    if len(entries) != sum(lengths):
        raise ValueError(f"{len(entries)} entries for {sum(lengths)} tokens")
    values = entries.tolist()
    return [values[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
