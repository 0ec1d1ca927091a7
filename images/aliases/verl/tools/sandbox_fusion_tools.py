"""The tool that runs programs. Derived classes call its pool as one of Ray's actors."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.experience.tools.code import CodeInterpreter


class _Remote:
    def __init__(self, workers: int) -> None:
        self._threads = ThreadPoolExecutor(workers, "code")

    def remote(self, function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


class _Pool:
    def __init__(self, workers: int) -> None:
        self.execute = _Remote(workers)


class SandboxFusionTool(CodeInterpreter):
    """`execution_pool.execute.remote(function, *arguments)` runs a function in a thread."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.execution_pool = _Pool(config.get("num_workers", 10))


__all__ = ["SandboxFusionTool"]
