"""What a step learns from: prompts drawn, responses sampled, scores earned."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from trainer.algorithms.dapo import informative_groups, overlong_penalty
from trainer.cluster.calls import task
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config
from trainer.data.batch import Batch
from trainer.data.dataset import Dataset, Prompt, PromptSampler, open_dataset
from trainer.data.prefetch import Prefetcher
from trainer.experience.conversations import Conversations
from trainer.experience.trajectory import Trajectory
from trainer.models.files import decode, load_tokenizer
from trainer.rewards.answer import Answer, Scored
from trainer.rollout.engines import Engines, split
from trainer.rollout.sampling import request_seed

logger = logging.getLogger(__name__)

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
        data = config.data
        tokenizer = load_tokenizer(config.model)
        training = open_dataset(data.train_files, tokenizer, data)
        validation = open_dataset(data.validation_files, tokenizer, data)
        sampler = PromptSampler(len(training), data.train_batch_size, data.shuffle, config.trainer.seed)
        return cls(tokenizer, training, validation, sampler)

    def steps(self, config: Config) -> int:
        """How many steps the run has: what is set, or as many as the epochs fill with whole batches, at least one."""
        settings, batch = config.trainer, config.data.train_batch_size
        return settings.total_steps or max(1, settings.total_epochs * len(self.training) // batch)


@dataclass(frozen=True)
class Earned:
    """What the responses of one step earned: `scores` [rows] float32, and metrics of them; `greedy_scores` [rows] are
    those of the greedy response to the same prompt, for the algorithm that compares with it."""

    scores: Tensor
    metrics: dict[str, float]
    greedy_scores: Tensor | None = None


@dataclass(frozen=True)
class Experience:
    """The responses of one step, `samples_per_prompt` in a row to each prompt, and what they will have earned: rewards
    are found beside passes that do not need them."""

    prompts: list[Prompt]
    responses: list[Trajectory]
    earned: Future[Earned]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, [rows] int64."""
        return torch.tensor([len(response.token_ids) for response in self.responses])

    def staleness(self, version: int) -> dict[str, float]:
        """By how many updates the weights that sampled are older than those of `version`, over all tokens sampled."""
        tokens: Counter[int] = Counter()
        for row in self.responses:
            if row.versions[0] == row.versions[-1]:  # versions never fall; counting token by token is much slower
                tokens[row.versions[0]] += row.mask.count(True)
            else:
                tokens.update(compress(row.versions, row.mask))
        total = sum((version - sampled_by) * count for sampled_by, count in tokens.items())
        return {
            "rollout/staleness_mean": total / tokens.total(),
            "rollout/staleness_max": float(version - min(tokens)),
        }

    def batch(self, with_log_probs: bool) -> Batch:
        """The rows; `with_log_probs` says whether engines gave them."""
        return Batch.from_responses(
            [prompt.token_ids for prompt in self.prompts],
            [response.token_ids for response in self.responses],
            [response.log_probs for response in self.responses] if with_log_probs else None,
            [response.mask for response in self.responses],
        )


class Scorer(Protocol):
    """A worker that scores responses, as the controller calls it."""

    def score(self, answers: Sequence[Answer]) -> list[Scored]: ...


class Collector:
    """Samples with a run's engines, scores with its reward workers."""

    def __init__(self, config: Config, engines: Engines, reward: WorkerGroup[Scorer], prompts: Prompts) -> None:
        self.config = config
        self.engines = engines
        self.conversations = Conversations(config, engines, prompts.tokenizer)
        self.reward = reward
        self.prompts = prompts
        self.prefetcher = Prefetcher(prompts.training, prompts.sampler)
        self.samples = config.rollout.samples_per_prompt
        self._thread = ThreadPoolExecutor(1, "reward")

    def collect(self, step: int, phase: Phase) -> Experience:
        """The experience of a step, with what its algorithm compares it with."""
        if self.config.algorithm.dynamic_sampling:
            return self._with_informative_groups(step, phase)
        experience = self.experience(*self._sampled(step, phase, first_row=0), phase)
        if self.config.algorithm.advantage != "remax":
            return experience
        earned = self._settled(experience, phase)
        with phase("generate"):
            greedy_scores = self.greedy_scores(experience.prompts)
        return replace(experience, earned=done(replace(earned, greedy_scores=greedy_scores)))

    def _with_informative_groups(self, step: int, phase: Phase) -> Experience:
        """Prompts are drawn until a batch is full of those whose responses differ in score; what is missing after the
        last round is filled with the others drawn."""
        wanted = self.config.responses
        prompts: list[Prompt] = []
        responses: list[Trajectory] = []
        scored: list[Scored] = []
        for _ in range(self.config.algorithm.max_sampling_rounds):
            drawn, sampled = self._sampled(step, phase, first_row=len(prompts))
            with phase("reward"):
                scored += self.score(drawn, sampled)
            prompts, responses = prompts + drawn, responses + sampled
            if int(self._informative(scored).sum()) >= wanted:
                break
        earned = self.earned(responses, scored)
        rows = self._informative(scored).logical_not().int().argsort(stable=True)[:wanted].tolist()
        metrics = earned.metrics | {"rollout/sampling_rounds": len(prompts) / wanted}
        chosen = Earned(earned.scores[rows], metrics)
        return Experience([prompts[row] for row in rows], [responses[row] for row in rows], done(chosen))

    def _sampled(self, step: int, phase: Phase, first_row: int) -> tuple[list[Prompt], list[Trajectory]]:
        """The next prompts and a response to each."""
        with phase("load"):
            drawn = self.draw()
        with phase("generate"):
            sampled = self.begin(drawn, step, first_row)
            self.conversations.finish(sampled)
        return drawn, sampled

    def experience(self, prompts: list[Prompt], rows: list[Trajectory], phase: Phase) -> Experience:
        """Finished responses, whose rewards are under way. A reward model is waited for: its GPU is the trainers'."""
        experience = Experience(prompts, rows, self._thread.submit(self._earn, prompts, rows))
        if self.config.reward.model.path is not None:
            self._settled(experience, phase)
        return experience

    def _earn(self, prompts: list[Prompt], rows: list[Trajectory]) -> Earned:
        return self.earned(rows, self.score(prompts, rows))

    def _settled(self, experience: Experience, phase: Phase) -> Earned:
        with phase("reward"):
            return experience.earned.result()

    def close(self) -> None:
        """Waits for rewards that are under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def draw(self) -> list[Prompt]:
        """The next prompts, each `samples_per_prompt` times in a row."""
        return [prompt for prompt in self.prefetcher.next_batch() for _ in range(self.samples)]

    def earned(self, rows: Sequence[Trajectory], scored: Sequence[Scored]) -> Earned:
        """What the scores of finished responses are together."""
        metrics = {
            "rollout/informative_fraction": self._informative(scored).float().mean().item(),
            "reward/failed": failed_fraction(scored),
            **{f"reward/{name}": value for name, value in mean_parts(scored).items()},
        }
        if self.config.rollout.environment.path is not None:
            metrics["rollout/turns"] = sum(row.turns for row in rows) / len(rows)
        return Earned(torch.tensor([one.value for one in scored]), metrics)

    def _informative(self, scored: Sequence[Scored]) -> Tensor:
        """Which responses differ in score from others to the same prompt, [rows] bool."""
        return informative_groups(torch.tensor([one.value for one in scored]), self.groups(len(scored)))

    def groups(self, rows: int) -> Tensor:
        """The number of each row's prompt, [rows] int64."""
        return torch.arange(rows) // self.samples

    def shaped(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """The scores with the price of length taken off, [rows]; `lengths` [rows] are those of the responses."""
        reward = self.config.reward
        if reward.overlong_buffer == 0:
            return scores
        longest = self.config.data.max_response_length
        return scores + overlong_penalty(lengths, longest, reward.overlong_buffer, reward.overlong_penalty)

    def greedy_scores(self, prompts: Sequence[Prompt]) -> Tensor:
        """The score of the greedy response to each row's prompt, [rows]; each prompt is asked once."""
        scores = torch.tensor([one.value for one in self.greedily_scored(prompts[:: self.samples])])
        return scores.repeat_interleave(self.samples)

    def held_out(self) -> dict[str, float]:
        """The share of held-out prompts whose greedy response earns the rule's full reward, and what a reward model
        says of them."""
        scored = self.greedily_scored([self.prompts.validation[i] for i in range(len(self.prompts.validation))])
        modelled = {f"validation/reward_{name}": value for name, value in mean_parts(scored).items() if name == "model"}
        return {"validation/exact_match": sum(one.rule == 1.0 for one in scored) / len(scored), **modelled}

    def greedily_scored(self, prompts: Sequence[Prompt]) -> list[Scored]:
        """The score of the greedy response to each prompt."""
        rows = self.conversations.begin(prompts, [0] * len(prompts), temperature=0.0)
        self.conversations.finish(rows)
        return self.score(prompts, rows)

    def score(self, prompts: Sequence[Prompt], rows: Sequence[Trajectory]) -> list[Scored]:
        """The reward of each response: its environment's, or that of what the policy said. Raises RewardError for one
        that is no finite number."""
        unscored = [place for place, row in enumerate(rows) if row.scored is None]
        texts = self.texts([rows[place].sampled for place in unscored])
        answers = [
            Answer(text, prompt.ground_truth, prompt.data_source, prompt.extra_info)
            for text, prompt in zip(texts, (prompts[place] for place in unscored), strict=True)
        ]
        if self.config.reward.model.path is not None:
            answers = [
                replace(
                    answer,
                    prompt_ids=prompts[place].token_ids,
                    response_ids=rows[place].token_ids,
                    messages=prompts[place].chat,
                )
                for answer, place in zip(answers, unscored, strict=True)
            ]
        parts = split(answers, len(self.reward))
        scored = iter(score for part in self.reward.call_each(task(Scorer.score, p) for p in parts) for score in part)
        return [row.scored or next(scored) for row in rows]

    def texts(self, responses: Sequence[Sequence[int]]) -> list[str]:
        return decode(self.prompts.tokenizer, responses)

    def begin(self, prompts: Sequence[Prompt], step: int, first_row: int) -> list[Trajectory]:
        """An empty trajectory for each prompt, `samples_per_prompt` of them in a row, with a seed of its own."""
        seed, rows = self.config.trainer.seed, range(first_row, first_row + len(prompts))
        seeds = [request_seed(seed, step, row // self.samples, row % self.samples) for row in rows]
        return self.conversations.begin(prompts, seeds, self.config.rollout.temperature)


def done(earned: Earned) -> Future[Earned]:
    """For who has nothing to wait for."""
    future: Future[Earned] = Future()
    future.set_result(earned)
    return future


def failed_fraction(scored: Sequence[Scored]) -> float:
    """The share of responses whose reward failed; says why the first of them did."""
    failures = [one.failure for one in scored if one.failure]
    if failures:
        logger.warning("%d of %d rewards failed, the first with: %s", len(failures), len(scored), failures[0])
    return len(failures) / len(scored)


def mean_parts(scored: Sequence[Scored]) -> dict[str, float]:
    """The means of what the rewards are made of, by name; empty without a reward model."""
    made = [one.parts for one in scored if one.parts]
    return {name: sum(parts[name] for parts in made) / len(made) for name in made[0]} if made else {}
