"""Collects the experience of a step: draws prompts, samples responses, scores them."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import compress, count
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms.dapo import informative_groups, overlong_penalty
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.batches.prefetch import Prefetcher
from trainer.data.batches.routes import Routes
from trainer.data.dataset import Prompt
from trainer.experience.conversations.sampler import Conversations
from trainer.experience.conversations.tool_agent import ToolAgent
from trainer.experience.environment import Program
from trainer.experience.failures import check_failed_shares, failed_fraction, failed_shares, retried_shares
from trainer.experience.reward_workers import RewardWorkers, Scorer
from trainer.experience.run_data import RunData
from trainer.experience.trajectory import Trajectory
from trainer.experience.validation import validation_metrics
from trainer.models.files import decode
from trainer.rewards.answer import Answer, Scored
from trainer.rewards.sources import has_scorer, may_score_itself
from trainer.rollout.engines import Engines
from trainer.rollout.sampling import request_seed

logger = logging.getLogger(__name__)

OLDEST = 8  # updates; the last bucket of rollout/staleness/N holds all tokens that are at least as old

Phase = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Scores:
    """The score of each response of a step, [rows] float32, and metrics of them.

    `greedy` [rows] holds the scores of greedy responses to the same prompts, for algorithms with a greedy baseline,
    length penalties included. `by_token` holds the parts of each row's score that are earned before the last token:
    (position among the tokens that the policy sampled, reward). `parts` holds the named numbers of each row's reward.
    `left_out` [rows] bool marks rows without a score, which learn nothing; None: no row.
    """

    values: Tensor
    metrics: dict[str, float]
    greedy: Tensor | None = None
    by_token: Sequence[Sequence[tuple[int, float]]] = ()
    parts: Sequence[Mapping[str, float]] = ()
    left_out: Tensor | None = None

    @property
    def answered(self) -> Tensor:
        """Which rows have a score, [rows] bool."""
        return torch.ones(len(self.values), dtype=torch.bool) if self.left_out is None else ~self.left_out

    @property
    def recorded(self) -> list[float]:
        """The score of each row, NaN for a row without one."""
        recorded: list[float] = self.values.where(self.answered, torch.nan).tolist()
        return recorded

    def components(self) -> dict[str, Tensor]:
        """Each number that every reward has, by name, [rows] float32; `score` is the score itself."""
        shared = [set(parts) for parts, answered in zip(self.parts, self.answered, strict=False) if answered]
        names = set.intersection(*shared) if shared else set()
        numbers = {name: torch.tensor([float(parts.get(name, 0.0)) for parts in self.parts]) for name in sorted(names)}
        return {"score": self.values, **numbers}


@dataclass(frozen=True)
class Experience:
    """The responses of one step, `samples_per_prompt` consecutive rows per prompt, and their scores.

    The scores are a future: rewards are computed while passes that do not need them run.
    """

    prompts: list[Prompt]
    responses: list[Trajectory]
    scores: Future[Scores]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each response, [rows] int64."""
        return lengths_of(self.responses)

    @property
    def truncated(self) -> Tensor:
        """Whether each response was cut at the limit, [rows] bool."""
        return torch.tensor([response.truncated for response in self.responses])

    def staleness(self, version: int, shares: bool) -> dict[str, float]:
        """Metrics: how many updates before `version` each token was sampled, over all sampled tokens. `shares` adds
        the share of tokens of each age."""
        tokens: Counter[int] = Counter()
        for row in self.responses:
            if row.versions[0] == row.versions[-1]:  # versions never fall; counting each token is much slower
                tokens[row.versions[0]] += row.mask.count(True)
            else:
                tokens.update(compress(row.versions, row.mask))
        total = sum((version - sampled_by) * count for sampled_by, count in tokens.items())
        metrics = {
            "rollout/staleness_mean": total / tokens.total(),
            "rollout/staleness_max": float(version - min(tokens)),
        }
        for sampled_by, sampled in tokens.items() if shares else ():
            name = f"rollout/staleness/{min(version - sampled_by, OLDEST)}"
            metrics[name] = metrics.get(name, 0.0) + sampled / tokens.total()
        return metrics

    def batch(self) -> Batch:
        """The responses as padded tensors, with the engines' log-probs and experts if they were asked for."""
        with_log_probs = all(response.with_log_probs for response in self.responses)
        prompts = [response.prompt for response in self.responses]
        batch = Batch.from_responses(
            prompts,
            [response.token_ids for response in self.responses],
            [response.log_probs for response in self.responses] if with_log_probs else None,
            [response.mask for response in self.responses],
        )
        if not any(response.with_routes for response in self.responses):
            return batch
        routes = Routes([response.routes for response in self.responses])
        return batch.with_(routes=routes.with_prompts_of_others(prompts))


@dataclass(frozen=True)
class Validation:
    """`validation.samples` consecutive responses to each held-out prompt, their rewards, and metrics of them."""

    prompts: list[Prompt]
    responses: list[Trajectory]
    scored: list[Scored]
    metrics: dict[str, float]


class Collector:
    """Samples with the engines of a run and scores with its reward workers."""

    def __init__(self, config: Config, engines: Engines, reward: WorkerGroup[Scorer], data: RunData) -> None:
        self.config = config
        self.engines = engines
        self.conversations = Conversations(config, engines, data.tokenizer)
        self.reward = RewardWorkers(reward, config)
        self.data = data
        self.prefetcher = Prefetcher(data.training, data.sampler)
        self.samples = config.rollout.samples_per_prompt
        self._thread = ThreadPoolExecutor(1, "reward")

    def collect(self, step: int, phase: Phase) -> Experience:
        """The experience of a step, with greedy scores if the algorithm needs them."""
        if self.config.algorithm.dynamic_sampling:
            return self._with_informative_groups(step, phase)
        experience = self.experience(*self._sampled(step, phase, first_row=0), phase)
        if not self.config.algorithm.estimator.needs_greedy_responses:
            return experience
        scores = self._wait_for_scores(experience, phase)
        with phase("generate"):
            greedy_scores, without_baseline = self.greedy_scores(experience.prompts)
        left_out = ~scores.answered | without_baseline
        return replace(experience, scores=completed(replace(scores, greedy=greedy_scores, left_out=left_out)))

    def _with_informative_groups(self, step: int, phase: Phase) -> Experience:
        """Draws prompts until those whose responses differ in score fill a batch (dynamic sampling, DAPO).

        If they do not after the last round, other drawn prompts fill the batch.
        """
        wanted = self.config.responses
        prompts: list[Prompt] = []
        responses: list[Trajectory] = []
        scored: list[Scored] = []
        most = self.config.algorithm.max_sampling_rounds
        for _ in count() if most is None else range(most):
            drawn, sampled = self._sampled(step, phase, first_row=len(prompts))
            with phase("reward"):
                scored += self._scored(drawn, sampled)
            prompts, responses = prompts + drawn, responses + sampled
            if int(self._informative(scored).sum()) >= wanted:
                break
        scores = self.summarized(prompts, responses, scored)
        rows = self._informative(scored).logical_not().int().argsort(stable=True)[:wanted].tolist()
        metrics = scores.metrics | {"rollout/sampling_rounds": len(prompts) / wanted}
        by_token, parts = [scores.by_token[row] for row in rows], [scores.parts[row] for row in rows]
        left_out = ~scores.answered[rows]
        chosen = Scores(scores.values[rows], metrics, by_token=by_token, parts=parts, left_out=left_out)
        return Experience([prompts[row] for row in rows], [responses[row] for row in rows], completed(chosen))

    def _sampled(self, step: int, phase: Phase, first_row: int) -> tuple[list[Prompt], list[Trajectory]]:
        """The next prompts, and a finished response to each."""
        with phase("load"):
            drawn = self.draw()
        with phase("generate"):
            sampled = self.begin(drawn, step, first_row)
            self.conversations.finish(sampled)
        return drawn, sampled

    def experience(self, prompts: list[Prompt], rows: list[Trajectory], phase: Phase) -> Experience:
        """Finished responses, scored in a thread. A reward model shares the trainers' GPUs, so this waits for it."""
        experience = Experience(prompts, rows, self._thread.submit(self._scores, prompts, rows))
        if self.config.reward.model.path is not None:
            self._wait_for_scores(experience, phase)
        return experience

    def _scores(self, prompts: list[Prompt], rows: list[Trajectory]) -> Scores:
        return self.summarized(prompts, rows, self._scored(prompts, rows))

    def _scored(self, prompts: list[Prompt], rows: list[Trajectory]) -> list[Scored]:
        """The rewards of a step's responses. Raises FailedResponsesError if too many have failed."""
        scored = self.score(prompts, rows)
        check_failed_shares(scored, self.config)
        return scored

    def _wait_for_scores(self, experience: Experience, phase: Phase) -> Scores:
        with phase("reward"):
            return experience.scores.result()

    def close(self) -> None:
        """Waits for rewards that are being computed, and ends the agents' programs."""
        self.conversations.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def draw(self) -> list[Prompt]:
        """The next prompts, each repeated `samples_per_prompt` times."""
        return [prompt for prompt in self.prefetcher.next_batch() for _ in range(self.samples)]

    def summarized(self, prompts: Sequence[Prompt], rows: Sequence[Trajectory], scored: Sequence[Scored]) -> Scores:
        """The scores of finished responses as a tensor, with their metrics."""
        left_out = self._left_out(scored)
        counted = [score for score, out in zip(scored, left_out, strict=True) if not out]
        answered = [prompt for prompt, out in zip(prompts, left_out, strict=True) if not out]
        metrics = {
            "rollout/informative_fraction": self._informative(scored).float().mean().item(),
            "reward/failed": failed_fraction(scored),
            **failed_shares("rollout/failed", scored),
            **retried_shares(rows, scored),
            **{f"reward/{name}": value for name, value in mean_parts(counted).items()},
            **{f"reward/info/{name}": value for name, value in mean_info(counted).items()},
            **{f"reward/source/{name}": value for name, value in mean_by_source(answered, counted).items()},
            **_conversation_metrics(rows),
        }
        values = torch.tensor([score.value for score in scored])
        parts = [score.numbers for score in scored]
        by_token = [score.by_token for score in scored]
        return Scores(values, metrics, by_token=by_token, parts=parts, left_out=torch.tensor(left_out))

    def _left_out(self, scored: Sequence[Scored]) -> list[bool]:
        """Which responses failed and get no score."""
        return [score.cause is not None and self.config.reward.failure_score is None for score in scored]

    def _informative(self, scored: Sequence[Scored]) -> Tensor:
        """Which responses belong to a prompt whose answers differ in score, [rows] bool."""
        groups, counted = self.groups(len(scored)), ~torch.tensor(self._left_out(scored))
        if not counted.any():
            return counted
        values = torch.tensor([score.value for score in scored])[counted]
        return torch.isin(groups, groups[counted][informative_groups(values, groups[counted])])

    def groups(self, rows: int) -> Tensor:
        """The number of each row's prompt, [rows] int64."""
        return torch.arange(rows) // self.samples

    def shaped(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """The scores plus the penalty on overlong responses, [rows]; `lengths` [rows] counts each response's tokens."""
        reward = self.config.reward
        if reward.overlong_buffer == 0:
            return scores
        longest = self.config.data.max_response_length
        return scores + overlong_penalty(lengths, longest, reward.overlong_buffer, reward.overlong_penalty)

    def greedy_scores(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """The score of the greedy response to each row's prompt, [rows], and whether it failed, [rows] bool; sampled
        once per prompt. A long response is penalised as a sampled one is: otherwise the baseline would reward long
        sampled responses."""
        rows, scored = self._greedy(prompts[:: self.samples])
        scores = torch.tensor([score.value for score in scored])
        shaped, left_out = self.shaped(scores, lengths_of(rows)), torch.tensor(self._left_out(scored))
        return shaped.repeat_interleave(self.samples), left_out.repeat_interleave(self.samples)

    def validate(self) -> Validation:
        """Responses to the held-out prompts.

        Their metrics: the share that failed, and of the others the share with the rule's full reward, the mean score of
        a reward model if there is one, and `validation_metrics` by data source.
        """
        settings, held_out = self.config.validation, self.data.validation
        prompts = [held_out[row] for row in range(len(held_out)) for _ in range(settings.samples)]
        seeds = [0] * len(prompts)  # greedy responses need none
        if settings.temperature > 0:  # the same in every validation; steps are counted from 1
            places = [divmod(row, settings.samples) for row in range(len(prompts))]
            seeds = [request_seed(self.config.trainer.seed, 0, *place) for place in places]
        rows = self.conversations.begin(prompts, seeds, settings.temperature, settings.truncation, with_log_probs=False)
        self.conversations.finish(rows)
        scored = self.score(prompts, rows)
        return Validation(prompts, rows, scored, self._validation_metrics(prompts, scored))

    def _validation_metrics(self, prompts: Sequence[Prompt], scored: Sequence[Scored]) -> dict[str, float]:
        left_out = self._left_out(scored)
        answers = [score for score, out in zip(scored, left_out, strict=True) if not out]
        metrics = failed_shares("validation/failed", scored)
        if metrics["validation/failed"]:
            first = next(score for score in scored if score.cause)
            logger.warning(
                "%d of %d responses of the validation failed%s; first failure: %s",
                *(sum(score.cause is not None for score in scored), len(scored)),
                "" if answers else ", so it measures nothing",
                first.failure,
            )
        if not answers:
            return metrics
        modelled = {
            f"validation/reward_{name}": value for name, value in mean_parts(answers).items() if name == "model"
        }
        exact = sum(score.rule == 1.0 for score in answers) / len(answers)
        sources = [prompt.data_source for prompt in prompts]
        by_source = validation_metrics(sources, scored, self.config.validation.samples, left_out)
        return metrics | {"validation/exact_match": exact, **modelled, **by_source}

    def _greedy(self, prompts: Sequence[Prompt]) -> tuple[list[Trajectory], list[Scored]]:
        """The greedy response to each prompt, and its score."""
        rows = self.conversations.begin(prompts, [0] * len(prompts), temperature=0.0, with_log_probs=False)
        self.conversations.finish(rows)
        return rows, self.score(prompts, rows)

    def score(self, prompts: Sequence[Prompt], rows: Sequence[Trajectory]) -> list[Scored]:
        """The reward of each response: from its environment, or else for the policy's own text.

        Raises RewardError if one is not a finite number.
        """
        settled = [row.scored or self._failed(prompt) for prompt, row in zip(prompts, rows, strict=True)]
        unscored = [place for place, score in enumerate(settled) if score is None]
        whole = self.config.reward.text == "conversation"
        texts = self.texts([rows[place].token_ids if whole else rows[place].sampled for place in unscored])
        answers = [
            Answer(text, prompts[place].ground_truth, prompts[place].data_source, _info(prompts[place], rows[place]))
            for text, place in zip(texts, unscored, strict=True)
        ]
        function = self.config.reward.custom_function
        if function.given:
            answers = [
                replace(answer, sampled_ids=rows[place].sampled)
                for answer, place in zip(answers, unscored, strict=True)
            ]
        if self.config.reward.model.path is not None:
            answers = [
                replace(
                    answer,
                    prompt_ids=rows[place].prompt,
                    response_ids=rows[place].token_ids,
                    messages=prompts[place].chat,
                )
                for answer, place in zip(answers, unscored, strict=True)
            ]
        scored = iter(self.reward.score(answers, [prompts[place].index for place in unscored]))
        return [score or next(scored) for score in settled]

    def _failed(self, prompt: Prompt) -> Scored | None:
        """The score where only the conversation itself could have given one, and did not: an answer all the same."""
        if has_scorer(self.config.reward, prompt.data_source) or not may_score_itself(self.config):
            return None
        return Scored(self.config.reward.failure_score or 0.0, "the conversation ended without a score")

    def texts(self, responses: Sequence[Sequence[int]]) -> list[str]:
        return decode(self.data.tokenizer, responses)

    def begin(self, prompts: Sequence[Prompt], step: int, first_row: int) -> list[Trajectory]:
        """An empty trajectory for each row of `prompts`, each with its own seed."""
        seed, rows = self.config.trainer.seed, range(first_row, first_row + len(prompts))
        seeds = [request_seed(seed, step, row // self.samples, row % self.samples) for row in rows]
        rollout, with_log_probs = self.config.rollout, self.config.has_rollout_log_probs(step)
        with_routes = self.config.actor.router_replay == "engine"
        return self.conversations.begin(
            prompts, seeds, rollout.temperature, rollout.truncation, with_log_probs, with_routes
        )


def _info(prompt: Prompt, row: Trajectory) -> dict[str, Any]:
    """The row's `extra_info` with verl's facts about its conversation."""
    agent = row.environment
    facts = agent.facts() if isinstance(agent, ToolAgent) else {"tool_rewards": [], "turn_scores": []}
    return {**prompt.extra_info, "num_turns": row.turns + row.answers + 1, **facts}


def _conversation_metrics(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of rows whose turns somebody answers; empty without any."""
    answered = [row for row in rows if row.environment is not None]
    if not answered:
        return {}
    metrics = {"rollout/turns": mean([row.turns for row in answered])}
    agents = [row.environment for row in answered if isinstance(row.environment, ToolAgent)]
    if agents:
        calls = sum(agent.calls for agent in agents)
        failed = sum(agent.failed_calls for agent in agents)
        metrics |= {"rollout/tool_calls": calls / len(agents), "rollout/failed_tool_calls": failed / max(1, calls)}
    programs = [row.environment for row in answered if isinstance(row.environment, Program)]
    if programs:
        metrics["rollout/failed_programs"] = mean([float(program.failed) for program in programs])
    return metrics


def lengths_of(rows: Sequence[Trajectory]) -> Tensor:
    """Tokens of each response, [rows] int64."""
    return torch.tensor([len(row.token_ids) for row in rows])


def completed(scores: Scores) -> Future[Scores]:
    """An already completed future."""
    future: Future[Scores] = Future()
    future.set_result(scores)
    return future


def mean_parts(scored: Sequence[Scored]) -> dict[str, float]:
    """The mean of each component of the rewards, by name; empty without a reward model."""
    made = [score.parts for score in scored if score.parts]
    return {name: sum(parts[name] for parts in made) / len(made) for name in made[0]} if made else {}


def mean_info(scored: Sequence[Scored]) -> dict[str, float]:
    """The mean of each further number that rules or functions returned, over the responses that have it."""
    names = {name for score in scored for name in score.info}
    return {name: mean([score.info[name] for score in scored if name in score.info]) for name in sorted(names)}


def mean_by_source(prompts: Sequence[Prompt], scored: Sequence[Scored]) -> dict[str, float]:
    """The mean reward by data source; empty if there is only one."""
    rewards: dict[str, list[float]] = {}
    for prompt, score in zip(prompts, scored, strict=True):
        rewards.setdefault(prompt.data_source, []).append(score.value)
    return {source: mean(values) for source, values in sorted(rewards.items())} if len(rewards) > 1 else {}
