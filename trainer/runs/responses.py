"""What a run keeps of the responses: a few samples of each step, and the trajectories of steps and validations."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.dataset import Prompt
from trainer.experience.collector import Experience, Scores, Validation
from trainer.experience.trajectory import Trajectory
from trainer.records.tracking import Sample
from trainer.records.trajectories import Row, TrajectoryWriter, text_of, trajectories_directory, validations_directory

SAMPLES_PER_STEP = 8

Texts = Callable[[Sequence[Sequence[int]]], list[str]]


class ResponseRecords:
    """Records responses in the run's directory; `texts` decodes their tokens."""

    def __init__(self, config: Config, run_dir: Path, texts: Texts) -> None:
        self._group, self._texts = config.rollout.samples_per_prompt, texts
        self._settings = config.trainer.trajectories
        self._steps = TrajectoryWriter(trajectories_directory(run_dir, self._settings), self._settings)
        self._validations = TrajectoryWriter(validations_directory(run_dir, self._settings), self._settings)

    def samples(self, experience: Experience, scores: Sequence[float]) -> list[Sample]:
        """The first response to each of the first few prompts."""
        prompts, responses = experience.prompts, experience.responses
        rows = range(0, len(prompts), self._group)[:SAMPLES_PER_STEP]
        texts = self._texts([responses[row].token_ids for row in rows])
        return [
            Sample(prompts[row].question, text, str(prompts[row].ground_truth), scores[row])
            for row, text in zip(rows, texts, strict=True)
        ]

    def write_step(self, step: int, experience: Experience, scores: Scores, batch: Batch) -> None:
        """Starts to write all responses of a step, if it is one of those to record."""
        if self._steps.wants(step):
            self._steps.write(step, partial(self._rows_of_step, experience, scores, batch))

    def write_validation(self, step: int, validation: Validation) -> None:
        """Starts to write all responses of the validation after a step, unless trajectories are off."""
        if self._settings.freq > 0:
            rewards, parts = (
                [score.value for score in validation.scored],
                [score.numbers for score in validation.scored],
            )
            self._validations.write(step, partial(self._rows, validation.prompts, validation.responses, rewards, parts))

    def truncate(self, last_step: int) -> None:
        """Removes what later steps recorded: a resumed run takes these steps again."""
        self._steps.truncate(last_step)
        self._validations.truncate(last_step)

    def flush(self) -> None:
        """Waits until everything is written."""
        self._steps.flush()
        self._validations.flush()

    def close(self) -> None:
        """`flush`, and ends the threads."""
        self._steps.close()
        self._validations.close()

    def _rows_of_step(self, experience: Experience, scores: Scores, batch: Batch) -> list[Row]:
        responses = experience.responses
        rows = self._rows(experience.prompts, responses, scores.recorded, scores.parts)
        if not self._settings.per_token:
            return rows
        log_probs = batch.rollout_log_probs if batch.old_log_probs is None else batch.old_log_probs
        values = {"log_probs": log_probs, "advantages": batch.advantages}
        return [
            {
                **row,
                "token_ids": response.token_ids,
                **{
                    name: tokens[number, : row["tokens"]].tolist()
                    for name, tokens in values.items()
                    if tokens is not None
                },
            }
            for number, (row, response) in enumerate(zip(rows, responses, strict=True))
        ]

    def _rows(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[Trajectory],
        rewards: Sequence[float],
        parts: Sequence[Mapping[str, float]],
    ) -> list[Row]:
        texts = self._texts([response.token_ids for response in responses])
        return [
            {
                "prompt_index": prompt.index,
                "data_source": prompt.data_source,
                "prompt": prompt.question,
                "response": text,
                "ground_truth": text_of(prompt.ground_truth),
                "reward": reward,
                "scores": json.dumps(numbers),
                "tokens": len(response.token_ids),
            }
            for prompt, response, text, reward, numbers in zip(prompts, responses, texts, rewards, parts, strict=True)
        ]
