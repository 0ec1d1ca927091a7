"""The interface of a hub: published environments, which ask the policy over an OpenAI-compatible endpoint.

Hubs run in a process of their own and under the user's choice of Python, where the trainer's packages may be missing.
This module and those in `trainer/experience/hubs/` import nothing but the standard library before they are opened.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from trainer.rows import Row

SPLITS = ("train", "validation")


class UnusableEnvironmentError(Exception):
    """An environment that cannot be opened as it is: `hint` says what to change."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


FULL = ("context_length_exceeded", "no_more_turns")
"""Codes of the endpoint's refusals that end a conversation as it is."""


@cache
def _pool() -> Any:
    """A client takes 0.1 s to make. A connection carries one request: the endpoint closes a conversation's own."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", timeout=None, default_headers={"Connection": "close"})


@dataclass(frozen=True)
class Policy:
    """Where a conversation reaches the policy: the base URL, the key and the model of an OpenAI client."""

    url: str
    key: str
    model: str

    def client(self) -> Any:
        """An AsyncOpenAI, which is not to be closed: its pool is that of all conversations."""
        return _pool().with_options(base_url=self.url, api_key=self.key)

    async def reply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """The policy's next message; None if the conversation has no room for one."""
        from openai import BadRequestError

        try:
            completion = await self.client().chat.completions.create(
                model=self.model, messages=messages, **({"tools": tools} if tools else {})
            )
        except BadRequestError as error:
            if error.code in FULL:
                return None
            raise
        message: dict[str, Any] = completion.choices[0].message.model_dump(exclude_none=True)
        return message


@dataclass(frozen=True)
class Task:
    """A row of an environment's data set. `prompt` holds the messages as far as they are known before the conversation
    starts; `ground_truth` is for the records."""

    prompt: Sequence[Mapping[str, Any]]
    ground_truth: Any = ""


@dataclass(frozen=True)
class Outcome:
    """A conversation's reward, and further numbers to log: those of each function that scored it."""

    score: float
    numbers: Mapping[str, float] = field(default_factory=dict)


class HubEnvironment(Protocol):
    """An environment that was opened."""

    def tasks(self, split: str) -> Sequence[Task]:
        """The rows of a split; always the same. Raises UnusableEnvironmentError without any."""
        ...

    async def play(self, split: str, number: int, policy: Policy) -> Outcome:
        """A conversation about a row. What it raises costs this conversation its reward and nothing else."""
        ...


@dataclass(frozen=True, kw_only=True)
class HubRow(Row):
    """A hub in `trainer/experience/hubs/`. `package` is what its environments need, in words of pip.

    `open(name, **arguments)` returns the environment. It raises ImportError without the package,
    UnusableEnvironmentError for an environment that cannot be trained on, and what the environment's code raises.
    """

    package: str
    open: Callable[..., HubEnvironment]
