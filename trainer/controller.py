"""The run: one process that tells all workers what to do next. `Controller.step` is PPO, top to bottom."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from trainer import cluster
from trainer.algorithms.advantages import explained_variance, generalized_advantages, whiten
from trainer.algorithms.kl import kl_estimate
from trainer.atomic import atomic_directory
from trainer.batch import Batch
from trainer.checkpoint import TrainingState, checkpoint_directory, fingerprint, new_checkpoint, read_checkpoint
from trainer.cluster import WorkerGroup
from trainer.config import Config
from trainer.data.dataset import Prompt, PromptDataset, PromptSampler
from trainer.errors import DataError, InterruptedRun
from trainer.rollout.agreement import log_prob_agreement
from trainer.rollout.sampling import Request, Response, request_seed
from trainer.stop_signal import StopSignal
from trainer.tracking import Sample, Tracker
from trainer.weight_sync import sync_weights
from trainer.workers import Workers, connect_ranks, start_workers

logger = logging.getLogger(__name__)

SAMPLES_PER_STEP = 8
Item = TypeVar("Item")


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended; the exact matches are the first and the last that this run measured."""

    run_dir: Path
    final_step: int
    first_exact_match: float | None
    last_exact_match: float | None


@dataclass(frozen=True)
class Prompts:
    """What a run reads: the prompts it trains on, those it is measured on, and how they become text again."""

    tokenizer: Any
    training: PromptDataset
    validation: PromptDataset
    sampler: PromptSampler

    @classmethod
    def load(cls, config: Config) -> Self:
        """Raises DataError for what is missing or does not fit."""
        from transformers import AutoTokenizer  # takes seconds, in which the workers start

        data = config.data
        tokenizer = AutoTokenizer.from_pretrained(config.model.directory, local_files_only=True)
        training = PromptDataset(data.train_files, tokenizer, data.max_prompt_length)
        validation = PromptDataset(data.validation_files, tokenizer, data.max_prompt_length)
        sampler = PromptSampler(len(training), data.train_batch_size, data.shuffle, config.trainer.seed)
        return cls(tokenizer, training, validation, sampler)


def train(config: Config) -> TrainingResult:
    """Runs PPO as `config` says, on the Ray cluster at RAY_ADDRESS or on this machine.

    Raises a TrainerError for whatever the user can put right; InterruptedRun after SIGTERM.
    """
    config = config.with_absolute_paths()
    model, settings = config.model.directory, config.trainer
    if not (model / "config.json").is_file():
        raise DataError(f"{model}: no model, config.json is not there", hint="set model.path to a model directory")
    resumed = read_checkpoint(settings.resume, model) if settings.resume else None
    run_dir = run_directory(config)
    with (
        Tracker(run_dir, settings.total_steps, config, resumed.step if resumed else None) as tracker,
        cluster.connected(),
        StopSignal() as stop,
    ):
        with tracker.phase("start_up"):
            slots = find_slots(config)
            workers = start_workers(config, slots)
            prompts = Prompts.load(config)
            connect_ranks(workers, slots, run_dir, settings.worker_timeout)
            controller = Controller(config, run_dir, tracker, stop, workers, prompts)
            controller.begin(resumed)
        return controller.run()


def find_slots(config: Config) -> list[cluster.Slot]:
    """A slot for each rank that the settings and the cluster allow. Raises ConfigError if the batches do not fit."""
    settings = config.trainer
    nodes = cluster.find_nodes(settings.nnodes, settings.n_gpus_per_node)
    gpus = nodes[0].gpus if settings.n_gpus_per_node is None else settings.n_gpus_per_node
    config.check_ranks(len(nodes) * max(1, gpus))
    logger.info("%d nodes: %s", len(nodes), ", ".join(node.address for node in nodes))
    return cluster.reserve_slots(nodes, gpus, settings.worker_timeout)


def run_directory(config: Config) -> Path:
    """Where the run writes: `output_dir/run_id`, the resumed run's directory, or one named by the time."""
    settings = config.trainer
    if settings.run_id is None and settings.resume is not None:
        return settings.resume.parent.parent
    return settings.output_dir / (settings.run_id or datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"))


class Controller:
    """Owns the workers, the prompts and the place in the run."""

    def __init__(
        self, config: Config, run_dir: Path, tracker: Tracker, stop: StopSignal, workers: Workers, prompts: Prompts
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.tracker = tracker
        self.stop = stop
        self.workers = workers
        self.prompts = prompts
        self.model_fingerprint = fingerprint(config.model.directory)
        self.progress = self._state(0)
        self.saved_step = 0
        self.exact_matches: list[float] = []

    def begin(self, resumed: TrainingState | None) -> None:
        """Continues from a checkpoint if there is one, and gives the engines their first weights."""
        if resumed is not None and self.config.trainer.resume is not None:
            self.prompts.sampler.load_state_dict(resumed.sampler)
            for group in (self.workers.actor, self.workers.critic):
                group.call("load", self.config.trainer.resume / group.role)
            self.progress, self.saved_step = resumed, resumed.step
        self.sync_weights()

    def run(self) -> TrainingResult:
        """All steps, with validation and checkpoints between them."""
        settings = self.config.trainer
        self.stop.defer()
        try:
            if self.progress.step == 0:
                self.tracker.log(0, self.validate())
            while self.progress.step < settings.total_steps and not self._good_enough():
                step = self.progress.step + 1
                metrics = self.step(step)
                self.progress = self._state(step)
                if step == settings.total_steps or (settings.test_freq > 0 and step % settings.test_freq == 0):
                    metrics |= self.validate()
                self.tracker.log(step, metrics)
                if settings.save_freq > 0 and step % settings.save_freq == 0:
                    self.save()
                self.stop.check()
        except InterruptedRun as error:
            raise self._leave() from error
        if settings.save_freq != 0 and self.saved_step < self.progress.step:
            self.save()
        self.export()
        first, last = (self.exact_matches[0], self.exact_matches[-1]) if self.exact_matches else (None, None)
        return TrainingResult(self.run_dir, self.progress.step, first, last)

    def step(self, step: int) -> dict[str, float]:
        """One step of PPO (Schulman et al. 2017), with the KL to the reference taken off the reward; its metrics."""
        phase, workers, started = self.tracker.phase, self.workers, time.perf_counter()
        with phase("generate"):
            prompts = [self.prompts.training[index] for index in self.prompts.sampler.next_batch()]
            prompts = [prompt for prompt in prompts for _ in range(self.config.rollout.samples_per_prompt)]
            responses = self.generate(self._requests(prompts, step))
            batch = _batch(prompts, responses)
            workers.rollout.call("sleep")
        with phase("reward"):
            scores = self.score(prompts, responses)
            self.tracker.log_samples(step, self._samples(prompts, responses, scores))
        with phase("old_log_prob"):
            batch = batch.with_(old_log_probs=forward(workers.actor, "log_probs", batch))
        with phase("reference"):
            batch = batch.with_(reference_log_probs=forward(workers.reference, "log_probs", batch))
        with phase("values"):
            batch = batch.with_(values=forward(workers.critic, "values", batch))
        batch, metrics = self.estimate_advantages(batch, torch.tensor(scores))
        self.stop.check()  # the last moment at which the state is still that of the step before
        with phase("update_critic"):
            metrics |= update(workers.critic, batch, self.config.critic.mini_batch_size)
        with phase("update_actor"):
            metrics |= update(workers.actor, batch, self.config.actor.mini_batch_size)
        with phase("sync_weights"):
            self.sync_weights()
        seconds = time.perf_counter() - started
        return metrics | {"time/step": seconds, "throughput/tokens_per_second": int(batch.lengths.sum()) / seconds}

    def _requests(self, prompts: Sequence[Prompt], step: int) -> list[Request]:
        """Each prompt as it stands, `samples_per_prompt` times in a row, sampled with a seed of its own."""
        seed, rollout = self.config.trainer.seed, self.config.rollout
        return [
            Request(
                prompt.token_ids,
                rollout.temperature,
                request_seed(seed, step, row // rollout.samples_per_prompt, row % rollout.samples_per_prompt),
            )
            for row, prompt in enumerate(prompts)
        ]

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """A response to each request, the requests spread over all engines."""
        parts = split(requests, len(self.workers.rollout))
        return [
            response for part in self.workers.rollout.call_each("generate", [(p,) for p in parts]) for response in part
        ]

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[float]:
        """The reward of each response."""
        texts = self._texts(responses)
        answers = [(text, prompt.ground_truth) for text, prompt in zip(texts, prompts, strict=True)]
        parts = split(answers, len(self.workers.reward))
        return [score for part in self.workers.reward.call_each("score", [(p,) for p in parts]) for score in part]

    def estimate_advantages(self, batch: Batch, scores: Tensor) -> tuple[Batch, dict[str, float]]:
        """Advantages and returns of each token, and the metrics of what was sampled; scores [rows]."""
        algorithm, mask = self.config.algorithm, batch.response_mask
        kl = kl_estimate(batch.old_log_probs, batch.reference_log_probs, algorithm.kl_estimator)
        rewards = token_rewards(scores, kl, mask, algorithm.kl_coefficient)
        advantages, returns = generalized_advantages(rewards, batch.values, mask, algorithm.gamma, algorithm.lam)
        metrics = {
            "reward/mean": scores.mean().item(),
            "reference/kl": kl[mask].mean().item(),
            "rollout/response_length": mask.sum(dim=1).float().mean().item(),
            "critic/explained_variance": explained_variance(batch.values, returns, mask),
        }
        if batch.rollout_log_probs is not None:
            metrics |= log_prob_agreement(batch.rollout_log_probs, batch.old_log_probs, mask)
        if algorithm.whiten_advantages:
            advantages = whiten(advantages, mask)
        return batch.with_(advantages=advantages, returns=returns), metrics

    def sync_weights(self) -> None:
        """Gives every engine the actor's weights."""
        sync_weights(self.workers.actor, self.workers.rollout, self.workers.on_gpus)

    def validate(self) -> dict[str, float]:
        """The share of held-out prompts whose greedy response earns the full reward."""
        with self.tracker.phase("validate"):
            prompts = [self.prompts.validation[index] for index in range(len(self.prompts.validation))]
            responses = self.generate([Request(prompt.token_ids, temperature=0.0) for prompt in prompts])
            scores = self.score(prompts, responses)
        self.exact_matches.append(sum(score == 1.0 for score in scores) / len(scores))
        return {"validation/exact_match": self.exact_matches[-1]}

    def _good_enough(self) -> bool:
        stop_at = self.config.trainer.stop_at
        return stop_at is not None and bool(self.exact_matches) and self.exact_matches[-1] >= stop_at

    def save(self) -> None:
        """Writes a checkpoint of the last finished step."""
        directory = checkpoint_directory(self.run_dir, self.progress.step)
        with self.tracker.phase("save"), new_checkpoint(directory, self.progress) as partial:
            for group in (self.workers.actor, self.workers.critic):
                group.call("save", partial / group.role)
        self.saved_step = self.progress.step
        logger.info("saved %s", directory)

    def export(self) -> None:
        """Writes the policy as a model directory that Transformers and vLLM load."""
        with self.tracker.phase("export"), atomic_directory(self.run_dir / "model") as partial:
            self.workers.actor.call("export", partial)

    def _leave(self) -> InterruptedRun:
        """Saves what was reached, unless that is saved or never to be; the error to end with."""
        step, saves = self.progress.step, self.config.trainer.save_freq != 0
        if saves and self.saved_step < step:
            self.save()
        directory = checkpoint_directory(self.run_dir, step)
        hint = f"continue with trainer.resume={directory}" if directory.exists() else ""
        return InterruptedRun(f"stopped by SIGTERM after step {step}", hint=hint)

    def _state(self, step: int) -> TrainingState:
        return TrainingState(
            step=step,
            seed=self.config.trainer.seed,
            sampler=self.prompts.sampler.state_dict(),
            model=self.model_fingerprint,
            config=self.config.model_dump(mode="json"),
        )

    def _texts(self, responses: Sequence[Response]) -> list[str]:
        return list(self.prompts.tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True))

    def _samples(
        self, prompts: Sequence[Prompt], responses: Sequence[Response], scores: Sequence[float]
    ) -> list[Sample]:
        """The first response to each of the first few prompts."""
        rows = range(0, len(prompts), self.config.rollout.samples_per_prompt)[:SAMPLES_PER_STEP]
        texts = self._texts([responses[row] for row in rows])
        return [
            Sample(prompts[row].question, text, prompts[row].ground_truth, scores[row])
            for row, text in zip(rows, texts, strict=True)
        ]


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coefficient: float) -> Tensor:
    """Minus the weighted KL at every token, plus the score at each row's last token.

    Args:
        scores: [rows]; kl: [rows, tokens]; mask: [rows, tokens] bool with at least one True in each row.
    """
    rewards = (-kl_coefficient * kl).where(mask, 0.0)
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(dim=1)
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def forward(group: WorkerGroup, method: str, batch: Batch) -> Tensor:
    """A forward pass over the batch, a shard per rank: [rows, response length], in the order of the rows."""
    shards = batch.shards(len(group))
    results = torch.cat(group.call_each(method, [(batch.rows(shard),) for shard in shards]))
    return results[torch.cat(shards).argsort()]


def update(group: WorkerGroup, batch: Batch, mini_batch_size: int) -> dict[str, float]:
    """A role's optimizer steps on the batch; every rank returns the same metrics."""
    shards = batch.shards(len(group), mini_batch_size)
    metrics: dict[str, float] = group.call_each("update", [(batch.rows(shard),) for shard in shards])[0]
    return metrics


def split(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Consecutive parts of nearly equal length, one for each of `count` workers; some are empty if items are few."""
    bounds = [len(items) * part // count for part in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]


def _batch(prompts: Sequence[Prompt], responses: Sequence[Response]) -> Batch:
    return Batch.from_responses(
        [prompt.token_ids for prompt in prompts],
        [response.token_ids for response in responses],
        None if responses[0].log_probs is None else [response.log_probs or () for response in responses],
    )
