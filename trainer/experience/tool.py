"""The interface of tools that a policy may call, under verl's names: verl's own tools of users run unchanged."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, model_validator

from trainer.data.formats.tool_schema import OpenAIFunctionToolSchema
from trainer.errors import ConfigError
from trainer.rows import Row


class ToolResponse(BaseModel):
    """What a tool says to the policy. Only text is supported."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _media_are_lists(cls, values: Any) -> Any:
        for name in ("image", "video"):
            if isinstance(values, dict) and values.get(name) is not None and not isinstance(values[name], list):
                raise ValueError(f"{name} is a list, like {name}=[...]")
        return values

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class Tool:
    """A tool. One object serves all conversations; each call is `create`, `execute`, `release` with an id of its own.

    `config` and `tool_schema` are those of the tool's entry in `data.tools_file`. Coroutines of all tools share one
    event loop, so one that computes or blocks holds up the others.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ConfigError(
                f"the tool {type(self).__name__} has no schema", hint="write tool_schema in its entry of the tools file"
            )
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The schema of a tool whose entry has none."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_kwargs: Any) -> tuple[str, ToolResponse]:
        """Starts a call; `create_kwargs` are those of the row's `extra_info.tools_kwargs`."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        """The answer to a call, its reward and its metrics. `agent_data` holds the conversation so far."""
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(self, instance_id: str, **_kwargs: Any) -> float:
        """The reward of a call so far."""
        del instance_id
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends a call."""


@dataclass
class AgentData:
    """A conversation, as tools see it."""

    messages: list[dict[str, Any]]
    tools_kwargs: dict[str, Any]
    request_id: str = field(default_factory=lambda: str(uuid4()))
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0
    response_ids: list[int] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    image_data: None = None


@dataclass(frozen=True, kw_only=True)
class ToolRow(Row):
    """A tool in `trainer/experience/tools/`. Entries of a tools file name it by `name` or by one of verl's classes."""

    tool: Callable[[dict[str, Any], OpenAIFunctionToolSchema | None], Tool]
    verl: tuple[str, ...] = ()
