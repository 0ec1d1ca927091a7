"""Environments of verifiers: `verifiers:NAME` is the module that `verifiers.load_environment` imports.

Source: https://docs.primeintellect.ai/verifiers; releases 0.2 and 0.3 have these environments and their rubrics.
"""

import os
from collections.abc import Sequence
from typing import Any

from trainer.experience.hub import FULL, HubEnvironment, HubRow, Outcome, Policy, Task, UnusableEnvironmentError

_OLDEST, _TOO_NEW = (0, 2), (0, 4)


class VerifiersEnvironment:
    """An environment with its data set, its turns and tools, and its rubric."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        import verifiers

        if not _OLDEST <= tuple(map(int, verifiers.__version__.split(".")[:2])) < _TOO_NEW:
            raise UnusableEnvironmentError(
                f"verifiers {verifiers.__version__} has other environments than those with data set and rubric",
                f"install {ROW.package}",
            )
        self._environment = verifiers.load_environment(name, **arguments)
        if getattr(self._environment, "requires_group_rollouts", False):
            raise UnusableEnvironmentError(
                "its rubric compares the responses of a group, and each conversation is scored on its own",
                "choose an environment whose reward functions take one response",
            )
        self._rows = {"train": self._rows_of("get_dataset"), "validation": self._rows_of("get_eval_dataset")}

    def _rows_of(self, method: str) -> list[dict[str, Any]]:
        try:
            return list(getattr(self._environment, method)())
        except ValueError as error:  # "dataset is not set"
            raise UnusableEnvironmentError(
                f"it has no data set: {error}", "give it one through rollout.environment.arguments, or write one"
            ) from error

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(row["prompt"], row.get("answer") or "") for row in self._rows[split]]

    async def play(self, split: str, number: int, policy: Policy) -> Outcome:
        output = await self._environment.run_rollout(self._rows[split][number], _client(policy), policy.model, {})
        if error := output.get("error"):
            raise RuntimeError(error["error_chain_str"] if isinstance(error, dict) else str(error))
        return Outcome(output["reward"], output.get("metrics") or {})


def _client(policy: Policy) -> Any:
    """verifiers' client of chat completions. Without room for a turn, the conversation ends and is scored."""
    from openai import BadRequestError
    from verifiers.clients import OpenAIChatCompletionsClient
    from verifiers.errors import OverlongPromptError

    class PolicyClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
        async def get_native_response(self, *positional: Any, **named: Any) -> Any:
            try:
                return await super().get_native_response(*positional, **named)
            except BadRequestError as error:
                if error.code in FULL:
                    raise OverlongPromptError from error
                raise

    return PolicyClient(policy.client())


def _open(name: str, **arguments: Any) -> HubEnvironment:
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    return VerifiersEnvironment(name, arguments)


ROW = HubRow(name="verifiers", package="verifiers>=0.2,<0.4", open=_open)
