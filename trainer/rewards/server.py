"""Rewards from a server over HTTP: batches of responses as JSON, scores back."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3

from trainer.config.sections.reward import RewardConfig
from trainer.rewards.answer import Answer, Scored
from trainer.rewards.scores import as_scored, failed_score

_PAUSE = 0.5  # seconds before the first retry; later pauses double


class RewardServer:
    """The server at `reward.server.url`.

    A request is `{"answers": [{"data_source", "solution_str", "ground_truth", "extra_info"}, ...]}`, a reply
    `{"scores": [...]}` with a number or a mapping with `score` for each answer, or null where scoring failed.
    """

    def __init__(self, settings: RewardConfig) -> None:
        self._settings = settings
        server = settings.server
        retries = urllib3.Retry(
            server.retries, backoff_factor=_PAUSE, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=None
        )
        self._http = urllib3.PoolManager(
            maxsize=server.requests, retries=retries, timeout=urllib3.Timeout(total=server.timeout)
        )
        self._threads = ThreadPoolExecutor(server.requests, "reward-server")

    def score(self, answers: Sequence[Answer]) -> list[Scored]:
        """The reward of each answer, in order; without a usable reply, its cause is `reward_server`. Raises RewardError
        if a score is not a finite number."""
        size = self._settings.server.batch_size
        parts = [answers[start : start + size] for start in range(0, len(answers), size)]
        return [scored for part in self._threads.map(self._part, parts) for scored in part]

    def _part(self, answers: Sequence[Answer]) -> list[Scored]:
        """The scores of one request. If it fails though the server is there, each answer is asked for alone: one of
        them may be the reason."""
        try:
            scores = self._ask(answers)
        except _NoReplyError as error:
            if len(answers) > 1 and not error.unreachable:
                return [scored for answer in answers for scored in self._part([answer])]
            return [failed_score(self._settings, "reward_server", str(error)) for _ in answers]
        return [
            failed_score(self._settings, "reward_error", "the reward server returned null")
            if score is None
            else as_scored(score, answer)
            for score, answer in zip(scores, answers, strict=True)
        ]

    def _ask(self, answers: Sequence[Answer]) -> list[Any]:
        """The scores as the server sent them. Raises _NoReplyError."""
        url = self._settings.server.url
        assert url is not None
        try:
            reply = self._http.request(
                "POST", url, body=json.dumps({"answers": list(map(_sent, answers))}), headers=_HEADERS
            )
        except urllib3.exceptions.HTTPError as error:
            cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) else error
            unreachable = isinstance(cause, urllib3.exceptions.NewConnectionError)
            raise _NoReplyError(f"the reward server at {url} does not answer: {error}", unreachable) from error
        if reply.status != 200:
            raise _NoReplyError(f"the reward server at {url} answered with status {reply.status}")
        try:
            scores = json.loads(reply.data)["scores"]
        except (ValueError, KeyError, TypeError, RecursionError):
            scores = None
        if not isinstance(scores, list) or len(scores) != len(answers):
            raise _NoReplyError(
                f"the reward server at {url} sent {reply.data[:200]!r} for {len(answers)} answers, instead of "
                '{"scores": [...]} with one score per answer'
            )
        return scores


class _NoReplyError(Exception):
    """The server sends no scores. `unreachable`: nothing listens at its address."""

    def __init__(self, message: str, unreachable: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable


_HEADERS = {"Content-Type": "application/json"}


def _sent(answer: Answer) -> dict[str, Any]:
    return {
        "data_source": answer.data_source,
        "solution_str": answer.response,
        "ground_truth": answer.ground_truth,
        "extra_info": dict(answer.extra_info),
    }
