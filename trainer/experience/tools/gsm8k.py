"""Checks an answer to a problem of GSM8K. The row's `create_kwargs.ground_truth` is the right one."""

from typing import Any

from trainer.experience.tool import Tool, ToolResponse, ToolRow
from trainer.rewards.rules.gsm8k import gsm8k

_NO_BETTER = -0.05  # the reward of an answer that is no better than the one before


class AnswerCheck(Tool):
    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._calls: dict[str, dict[str, Any]] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        truth = kwargs.get("ground_truth") or (kwargs.get("create_kwargs") or {}).get("ground_truth")
        self._calls[instance_id] = {"answer": "", "truth": truth, "reward": 0.0}
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        call, answer = self._calls[instance_id], str(parameters.get("answer", ""))
        call["answer"] = answer
        reward = await self.calc_reward(instance_id)
        step = 0.0 if reward > call["reward"] else _NO_BETTER
        call["reward"] = reward
        return ToolResponse(text=f"Current parsed answer={answer!r} reward={reward}"), step, {}

    async def calc_reward(self, instance_id: str, **_kwargs: Any) -> float:
        call = self._calls[instance_id]
        return gsm8k(call["answer"], call["truth"], "flexible")

    async def release(self, instance_id: str, **_kwargs: Any) -> None:
        self._calls.pop(instance_id, None)


ROW = ToolRow(name="gsm8k", tool=AnswerCheck, verl=("verl.tools.gsm8k_tool.Gsm8kTool",))
