"""Responses to score, and their rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, get_args

RewardCause = Literal["reward_error", "reward_timeout", "reward_server", "reward_sandbox"]
Cause = Literal[RewardCause, "environment_error", "program_error"]
"""Why a response is no answer, as in the metrics `rollout/failed/CAUSE`."""
REWARD_CAUSES: tuple[Cause, ...] = get_args(RewardCause)
# What the same function raises for the same response, it raises again.
PASSING_CAUSES: tuple[Cause, ...] = tuple(cause for cause in REWARD_CAUSES if cause != "reward_error")


@dataclass(frozen=True)
class Answer:
    """A response with what scoring needs. The ground truth is what the data holds: text, a number, a list, a mapping.

    `sampled_ids` are the tokens of `response`; only custom functions get them. Only reward models use the other tokens
    and the messages of the prompt.
    """

    response: str
    ground_truth: Any
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    sampled_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    messages: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Scored:
    """The reward of a response. If scoring failed, `value` is `reward.failure_score`, or 0 without that, `failure` says
    why, and `traceback` where in the user's code. `cause` is set if the response is no answer. `retried` holds the
    causes of earlier attempts to score it.

    With a reward model, `parts` holds the scores of rule and model, from which `value` is computed. `info` holds
    further numbers of the rule or function, to be logged. `pred` is the answer in the response: validation lets several
    responses vote (`maj@K`).

    `by_token` is the part of `value` that is earned at certain tokens of the response: (position, reward). The rest is
    earned at the last token.
    """

    value: float
    failure: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, float] = field(default_factory=dict)
    by_token: tuple[tuple[int, float], ...] = ()
    pred: str | None = None
    traceback: str = ""
    cause: Cause | None = None
    retried: tuple[Cause, ...] = ()

    @property
    def rule(self) -> float:
        """The score of the rule or of the user's function."""
        return self.parts.get("rule", self.value)

    @property
    def numbers(self) -> dict[str, float]:
        """`parts` and `info` together."""
        return {**self.parts, **self.info}


@dataclass(frozen=True)
class Reply:
    """What a reward process sends: a score; or `failure`, why this response has none, with its `cause` and `traceback`;
    or `refusal` (message, hint), why the run must end."""

    scored: Scored = Scored(0.0)
    failure: str = ""
    traceback: str = ""
    refusal: tuple[str, str] | None = None
    cause: Cause = "reward_error"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """The reply that `to_json` described. Raises TypeError, ValueError or KeyError for anything else."""
        scored, refusal, cause = given["scored"], given["refusal"], given["cause"]
        if cause not in REWARD_CAUSES:
            raise ValueError(f"no cause of a failed reward: {cause}")
        return cls(
            Scored(
                float(scored["value"]),
                str(scored["failure"]),
                {str(name): float(value) for name, value in scored["parts"].items()},
                {str(name): float(value) for name, value in scored["info"].items()},
                tuple((int(place), float(reward)) for place, reward in scored["by_token"]),
                None if scored["pred"] is None else str(scored["pred"]),
            ),
            str(given["failure"]),
            str(given["traceback"]),
            None if refusal is None else (str(refusal[0]), str(refusal[1])),
            cause,
        )
