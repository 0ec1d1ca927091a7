"""What a step learns from: prompts drawn, responses sampled, scores earned."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from trainer.algorithms.dapo import informative_groups, overlong_penalty
from trainer.batch import Batch
from trainer.config import Config
from trainer.data.dataset import Dataset, Prompt, PromptSampler, open_dataset
from trainer.model_files import check_tokenizer
from trainer.rewards import Answer, Scored
from trainer.rollout.sampling import Request, Response, request_seed
from trainer.workers import Workers

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Prompts:
    """What a run reads: the prompts it trains on, those it is measured on, and how they become text again."""

    tokenizer: Any
    training: Dataset
    validation: Dataset
    sampler: PromptSampler

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises DataError for what is missing or does not fit."""
        from transformers import AutoTokenizer  # takes seconds, in which the workers start

        data = config.data
        tokenizer = AutoTokenizer.from_pretrained(config.model.directory, local_files_only=True)
        check_tokenizer(tokenizer, config.model.directory)
        training = open_dataset(data.train_files, tokenizer, data)
        validation = open_dataset(data.validation_files, tokenizer, data)
        sampler = PromptSampler(len(training), data.train_batch_size, data.shuffle, config.trainer.seed)
        return cls(tokenizer, training, validation, sampler)

    def steps(self, config: Config) -> int:
        """How many steps the run has: what is set, or as many as the epochs fill with whole batches, at least one."""
        settings, batch = config.trainer, config.data.train_batch_size
        return settings.total_steps or max(1, settings.total_epochs * len(self.training) // batch)


@dataclass(frozen=True)
class Experience:
    """The responses of one step, `samples_per_prompt` in a row to each prompt. `groups` counts the prompts,
    [rows] int64; `scores` [rows] float32 are as earned; `metrics` say how they were sampled; `greedy_scores` [rows] are
    those of the greedy response to the same prompt, for the algorithm that compares with it."""

    prompts: list[Prompt]
    responses: list[Response]
    scores: Tensor
    metrics: dict[str, float]
    greedy_scores: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, [rows] int64."""
        return torch.tensor([len(response.token_ids) for response in self.responses])

    def batch(self) -> Batch:
        return Batch.from_responses(
            [prompt.token_ids for prompt in self.prompts],
            [response.token_ids for response in self.responses],
            None if self.responses[0].log_probs is None else [response.log_probs or () for response in self.responses],
        )


class Collector:
    """Samples and scores with a run's workers."""

    def __init__(self, config: Config, workers: Workers, prompts: Prompts) -> None:
        self.config = config
        self.workers = workers
        self.prompts = prompts
        self.samples = config.rollout.samples_per_prompt

    def collect(self, step: int, phase: Phase) -> Experience:
        """The experience of a step, with what its algorithm compares it with."""
        experience = self._sampled(step, phase)
        if self.config.algorithm.advantage != "remax":
            return experience
        with phase("generate"):
            return replace(experience, greedy_scores=self.greedy_scores(experience.prompts))

    def _sampled(self, step: int, phase: Phase) -> Experience:
        """Responses and scores. With dynamic sampling, prompts are drawn until a batch is full of those whose
        responses differ in score; what is missing after the last round is filled with the others drawn."""
        algorithm, wanted = self.config.algorithm, self.config.data.train_batch_size * self.samples
        prompts: list[Prompt] = []
        responses: list[Response] = []
        scored: list[Scored] = []
        informative = torch.zeros(0, dtype=torch.bool)
        for _ in range(algorithm.max_sampling_rounds if algorithm.dynamic_sampling else 1):
            with phase("load"):
                drawn = [self.prompts.training[index] for index in self.prompts.sampler.next_batch()]
                drawn = [prompt for prompt in drawn for _ in range(self.samples)]
            with phase("generate"):
                sampled = self.generate(self._requests(drawn, step, first_row=len(prompts)))
            with phase("reward"):
                scored += self.score(drawn, sampled)
            prompts, responses = prompts + drawn, responses + sampled
            scores = torch.tensor([one.value for one in scored])
            informative = informative_groups(scores, self.groups(len(scores)))
            if int(informative.sum()) >= wanted:
                break
        metrics = {
            "rollout/informative_fraction": informative.float().mean().item(),
            "reward/failed": failed_fraction(scored),
        }
        if not algorithm.dynamic_sampling:
            return Experience(prompts, responses, scores, metrics)
        rows = informative.logical_not().int().argsort(stable=True)[:wanted].tolist()
        metrics["rollout/sampling_rounds"] = len(prompts) / wanted
        return Experience([prompts[row] for row in rows], [responses[row] for row in rows], scores[rows], metrics)

    def groups(self, rows: int) -> Tensor:
        """The number of each row's prompt, [rows] int64."""
        return torch.arange(rows) // self.samples

    def shaped(self, experience: Experience) -> Tensor:
        """The scores with the price of length taken off, [rows]."""
        reward = self.config.reward
        if reward.overlong_buffer == 0:
            return experience.scores
        longest = self.config.data.max_response_length
        return experience.scores + overlong_penalty(
            experience.lengths, longest, reward.overlong_buffer, reward.overlong_penalty
        )

    def greedy_scores(self, prompts: Sequence[Prompt]) -> Tensor:
        """The score of the greedy response to each row's prompt, [rows]; each prompt is asked once."""
        distinct = prompts[:: self.samples]
        responses = self.generate([Request(prompt.token_ids, temperature=0.0) for prompt in distinct])
        scores = torch.tensor([one.value for one in self.score(distinct, responses)])
        return scores.repeat_interleave(self.samples)

    def exact_match(self) -> float:
        """The share of held-out prompts whose greedy response earns the full reward."""
        prompts = [self.prompts.validation[index] for index in range(len(self.prompts.validation))]
        responses = self.generate([Request(prompt.token_ids, temperature=0.0) for prompt in prompts])
        scored = self.score(prompts, responses)
        return sum(one.value == 1.0 for one in scored) / len(scored)

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """A response to each request, the requests spread over all engines."""
        parts = split(requests, len(self.workers.rollout))
        return [
            response for part in self.workers.rollout.call_each("generate", [(p,) for p in parts]) for response in part
        ]

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Scored]:
        """The reward of each response. Raises RewardError for one that is no finite number."""
        texts = self.texts(responses)
        answers = [
            Answer(text, prompt.ground_truth, prompt.data_source, prompt.extra_info)
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        parts = split(answers, len(self.workers.reward))
        return [score for part in self.workers.reward.call_each("score", [(p,) for p in parts]) for score in part]

    def texts(self, responses: Sequence[Response]) -> list[str]:
        return list(self.prompts.tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True))

    def _requests(self, prompts: Sequence[Prompt], step: int, first_row: int) -> list[Request]:
        """Each prompt as it stands, `samples_per_prompt` times in a row, sampled with a seed of its own."""
        seed, temperature = self.config.trainer.seed, self.config.rollout.temperature
        return [
            Request(prompt.token_ids, temperature, request_seed(seed, step, row // self.samples, row % self.samples))
            for row, prompt in enumerate(prompts, start=first_row)
        ]


def failed_fraction(scored: Sequence[Scored]) -> float:
    """The share of responses whose reward failed; says why the first of them did."""
    failures = [one.failure for one in scored if one.failure]
    if failures:
        logger.warning("%d of %d rewards failed, the first with: %s", len(failures), len(scored), failures[0])
    return len(failures) / len(scored)


def split(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Consecutive parts of nearly equal length, one for each of `count` workers; some are empty if items are few."""
    bounds = [len(items) * part // count for part in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
