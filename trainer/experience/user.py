"""The interface of simulated users that answer a policy, under verl's names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from trainer.rows import Row


class Interaction:
    """A simulated user. One object serves all conversations, each with an id of its own.

    `config` is that of its entry in `rollout.interactions_file`. `kwargs` are those of the row's
    `extra_info.interaction_kwargs`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **_kwargs: Any) -> str:
        """Starts a conversation; returns its id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Whether the conversation ends, what the user says, the score of the policy's turn, and further facts."""
        raise NotImplementedError(f"{type(self).__name__} has no generate_response")

    async def calculate_score(self, *_args: Any, **_kwargs: Any) -> float:
        """The score of the conversation so far."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """Ends a conversation."""


@dataclass(frozen=True, kw_only=True)
class UserRow(Row):
    """A user in `trainer/experience/users/`. Files name it by `name` or by one of verl's classes."""

    user: Callable[[dict[str, Any]], Interaction]
    verl: tuple[str, ...] = ()
