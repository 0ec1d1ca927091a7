"""Runs Python programs: in the sandbox of this image, or on the SandboxFusion server at `sandbox_fusion_url`."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.errors import ConfigError
from trainer.experience.tool import Tool, ToolResponse, ToolRow
from trainer.rewards.sandbox.fusion import run_remotely
from trainer.rewards.sandbox.programs import Ended, Limits, check, run_program

logger = logging.getLogger(__name__)

_SETTINGS = {"sandbox_fusion_url", "default_timeout", "default_language", "memory_limit_mb", "num_workers", "type"}
_LIMITS = {"rate_limit", "enable_global_rate_limit"}  # of the workers, which num_workers counts


class CodeInterpreter(Tool):
    """The parameter `code` is the program, `timeout` its seconds, at most `default_timeout`: more would keep other
    calls from a thread. The answer is all that it wrote. Raises ConfigError if the sandbox cannot run programs."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        unknown = sorted(config.keys() - _SETTINGS - _LIMITS)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]}", hint=f"known: {', '.join(sorted(_SETTINGS))}")
        self.sandbox_fusion_url = config.get("sandbox_fusion_url") or None
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        self.memory_limit_mb = config.get("memory_limit_mb", 1024)
        place = f"programs run at {self.sandbox_fusion_url}" if self.sandbox_fusion_url else check()
        logger.info("tool code: %s", place)
        self._threads = ThreadPoolExecutor(config.get("num_workers", 10), "code")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_kwargs: Any
    ) -> tuple[ToolResponse, None, None]:
        asked = float(parameters.get("timeout", self.default_timeout))
        program = (
            str(parameters.get("code", "")),
            min(asked, self.default_timeout) if asked > 0 else self.default_timeout,
            str(parameters.get("language", self.default_language)),
        )
        loop = asyncio.get_running_loop()
        response = await loop.run_in_executor(self._threads, self.execute_code, instance_id, *program)
        return response, None, None

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        """The output of a program."""
        del instance_id
        ended = self._run(code, timeout, language)
        return ToolResponse(text="no stdout here" if ended.timed_out else ended.stdout + ended.stderr)

    def _run(self, code: str, timeout: float, language: str) -> Ended:
        if self.sandbox_fusion_url is not None:
            return run_remotely(self.sandbox_fusion_url, code, None, timeout, self.memory_limit_mb, language)
        if language != "python":
            raise ValueError(f"this sandbox runs python, not {language}")
        return run_program(code, Limits(timeout, self.memory_limit_mb))


ROW = ToolRow(name="code", tool=CodeInterpreter, verl=("verl.tools.sandbox_fusion_tools.SandboxFusionTool",))
